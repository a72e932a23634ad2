// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools pins, in go.mod, the programs that hack/tools.sh builds. What has a main package
// stands there as a tool; critest is a test binary, so what its test imports is named here.
package tools

import (
	_ "github.com/onsi/ginkgo/v2"
	_ "github.com/onsi/gomega"
	_ "sigs.k8s.io/cri-tools/pkg/benchmark"
	_ "sigs.k8s.io/cri-tools/pkg/common"
	_ "sigs.k8s.io/cri-tools/pkg/framework"
	_ "sigs.k8s.io/cri-tools/pkg/validate"
	_ "sigs.k8s.io/cri-tools/pkg/version"
)
