// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"context"

	"github.com/cnireload/cnireload/cnireload/conftemplate"
)

// RenderedFile is the name of the file that a template is rendered to, in the
// configuration directory.
const RenderedFile = conftemplate.RenderedFile

// TemplateState describes the template and what became of it.
type TemplateState = conftemplate.State

type templateConfig struct{ path, record string }

// Render renders the template of n for podCIDRs, a comma-separated list as in
// the CRI, and loads the outcome. It returns once the outcome is in use, or
// with an error and everything as it was; plugins that do not answer are waited
// for no longer than ten seconds. A list that is not ours and in use has
// precedence: then nothing is rendered until it goes, nothing is an error, and
// the snapshot says so. What failed is tried again when the template changes.
//
// Concurrent calls are carried out one after the other. Without a template
// Render checks the CIDRs and does nothing.
func (n *Network) Render(ctx context.Context, podCIDRs string) error {
	cidrs, err := conftemplate.ParseCIDRs(podCIDRs)
	if err != nil {
		return err // as stock, also without a template
	}
	if n.config.template.path == "" {
		return nil
	}
	return n.request(ctx, request{cidrs: cidrs})
}
