// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package vendors

import (
	"encoding/json"
	"path"
	"testing"
)

// The index and the files belong together, and the files are what they say.
func TestIndex(t *testing.T) {
	all, err := All()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 35 {
		t.Errorf("only %d networks", len(all))
	}
	listed := map[string]bool{"vendors.json": true}
	for _, v := range all {
		if listed[v.File] || v.Name == "" || v.Name+path.Ext(v.File) != v.File || path.Ext(v.As) != path.Ext(v.File) || v.Source == "" || len(v.Installed) == 0 {
			t.Errorf("%+v", v)
		}
		listed[v.File] = true
		b, err := v.Config()
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			continue
		}
		var conf struct {
			Name, CNIVersion, Type string
			Plugins                []struct{ Type string }
		}
		if err := json.Unmarshal(b, &conf); err != nil {
			t.Errorf("%s: %v", v.File, err)
		}
		if conf.Name == "" || conf.CNIVersion == "" || (conf.Type == "") != (path.Ext(v.File) == ".conflist") || (conf.Plugins == nil) != (conf.Type != "") {
			t.Errorf("%s: %+v", v.File, conf)
		}
		for _, a := range v.Agent {
			if a.Plugin == "" || a.Kind == "" || a.Target == "" || a.Mode != "enforce" && a.Mode != "report" || a.Mode == "enforce" && a.Key == "" {
				t.Errorf("%s: %+v", v.Name, a)
			}
		}
	}
	entries, err := files.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !listed[e.Name()] {
			t.Errorf("%s is not in vendors.json", e.Name())
		}
	}
}
