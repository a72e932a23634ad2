# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Thin: what is done is in hack/ and test/. "make help" lists the targets.

LINE ?= v2.4
export LINE KEEP STOP CASE SEED SIDE FOCUS

.DEFAULT_GOAL := help
.PHONY: help build stock run test test-all test-unit test-e2e test-node test-race test-upstream test-upstream-race test-cri test-arm64 \
	cases critest node timeline bench bench-storm soak verify refresh vendor package dist reproduce clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

build: ## build the patched containerd of LINE into _output/LINE
	@hack/build.sh $(LINE)

stock: ## build its unpatched twin into _output/stock/LINE
	@hack/build.sh --stock $(LINE)

run: ## install, build and walk through real input; KEEP=1 leaves the daemon running, STOP=1 ends it
	@hack/test.sh run $(LINE)

test: ## everything that CI runs on LINE, with one table at the end; other lines are verified and built
	@hack/ci.sh $(STAGES)

test-all: ## the same, with nothing taken from an earlier run, and all that takes hours
	@hack/ci.sh -all $(STAGES)

test-unit: ## the library's and hack's own tests, in about two minutes
	@hack/ci.sh -short unit,hack

test-e2e: ## end-to-end cases on stock and patched; CASE=S3 for one
	@hack/test.sh e2e $(LINE)

test-race: ## the cases and short soaks on a patched daemon built with the race detector; CASE=S3 for one
	@hack/test.sh race $(LINE)

test-upstream: ## upstream's own tests on stock and patched, compared
	@hack/upstream-tests.sh $(LINE)

test-upstream-race: ## the same with the race detector
	@hack/upstream-tests.sh --race $(LINE)

test-cri: ## upstream's CRI integration tests on stock and patched, compared
	@hack/cri-integration.sh $(LINE)

test-arm64: ## the library's unit tests for arm64 under qemu
	@hack/arm64.sh

cases: ## table of the cases: what stock does, what the patched daemon does
	@hack/test.sh cases $(LINE)

node: ## a kubelet without a cluster on the patched containerd, until Ctrl-C; SIDE=stock for the other
	@hack/test.sh node $(LINE)

test-node: ## scenarios with a real kubelet on stock and patched; CASE=BootWindow for one
	@hack/test.sh test-node $(LINE)

timeline: ## boot a node on both sides and draw it into docs/images
	@hack/test.sh timeline $(LINE)

soak: ## ten minutes of random changes against a model, and ten of random scripts beside stock; SEED=N repeats a run
	@hack/test.sh soak $(LINE)

critest: ## the CRI validation suite on stock and patched, compared; FOCUS=REGEXP for some specs
	@hack/test.sh critest $(LINE)

bench: ## compare stock and patched figures
	@hack/test.sh bench $(LINE)

bench-storm: ## what storms of failing pods cost stock and patched; ARGS='-only fail -pods 20' for less
	@hack/test.sh bench-storm $(LINE) $(ARGS)

verify: ## prove that the patches of LINE apply exactly and have good headers
	@hack/verify.sh $(LINE)

refresh: ## write the commits of _output/src/LINE back to patches/LINE
	@hack/refresh.sh $(LINE)

vendor: ## make vendor/ (ignored by git; release sources carry it)
	@hack/vendor.sh

package: ## tarball, deb and rpm of LINE into _output/dist
	@hack/package.sh $(LINE)

dist: ## all that a release of LINE has, for amd64 and arm64, in _output/dist/LINE
	@hack/dist.sh $(LINE)

reproduce: ## build LINE elsewhere with an empty build cache, and compare the bytes
	@hack/reproduce.sh $(LINE)

clean: ## remove _output and vendor
	@hack/clean.sh
