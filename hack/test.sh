#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/test.sh run|e2e|race|cases|soak|bench|bench-storm|critest|node|test-node|timeline LINE [ARG...]: builds what
# is needed, then hands over to test/.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
what=${1-}
use_line "${2-}"
export LINE=$line
[ "$(id -u)" = 0 ] || die "needs root for mounts and network namespaces: run it with sudo"
[ "$(uname -s)" = Linux ] || die "needs Linux, this is $(uname -s)"
"$root/hack/deps.sh"
"$root/hack/build.sh" "$line" >/dev/null
[ "$what" = run ] || "$root/hack/build.sh" --stock "$line" >/dev/null
case $what in
run) groups=(node) ;;
node | test-node | timeline) groups=(node kubelet) ;;
*) groups=(node test) ;;
esac
"$root/hack/tools.sh" "${groups[@]}" >/dev/null
cd "$root/test"
case $what in
run)
	# Built first and then run: an interrupt must reach the walkthrough itself, not "go run".
	go build -o "$out/hack/walkthrough" ./cmd/walkthrough
	exec "$out/hack/walkthrough"
	;;
e2e) exec go test -count=1 -v -timeout=60m ./e2e/... -run "${CASE:+^Test${CASE}(\$|[^0-9])}" ;;
race)
	# Every case, and a minute of each soak, against a patched daemon that reports races: a report
	# fails the case. It is some times slower; so are the waits.
	CNIRELOAD_PATCHED_BIN=$("$root/hack/build.sh" --race "$line")
	export CNIRELOAD_PATCHED_BIN CNIRELOAD_SLOW=4 CNIRELOAD_SOAK=${CNIRELOAD_SOAK:-60s} CNIRELOAD_SEED=${SEED-}
	export GORACE="history_size=3 ${GORACE-}"
	exec go test -count=1 -v -timeout=120m ./e2e/... -run "${CASE:+^Test${CASE}(\$|[^0-9])}"
	;;
cases)
	go build -o "$out/hack/cases" ./cmd/cases
	exec "$out/hack/cases"
	;;
soak) CNIRELOAD_SOAK=10m CNIRELOAD_SEED=${SEED-} exec go test -count=1 -v -timeout=45m ./e2e/... -run '^Test(Differential)?Soak$' ;;
bench)
	go build -o "$out/hack/bench" ./bench
	exec "$out/hack/bench"
	;;
bench-storm)
	go build -o "$out/hack/storm" ./storm
	exec "$out/hack/storm" "${@:3}"
	;;
test-node) exec go test -count=1 -v -timeout=60m ./node -run "${CASE:+^Test${CASE}\$}" ;;
node)
	go build -o "$out/hack/node" ./cmd/node
	exec "$out/hack/node" -side "${SIDE:-patched}"
	;;
timeline)
	go build -o "$out/hack/timeline" ./cmd/timeline
	CNIRELOAD_TIMELINE=$out/timeline go test -count=1 -v -timeout=30m ./node -run '^TestBootWindow$'
	exec "$out/hack/timeline" -in "$out/timeline" -out "$root/docs/images"
	;;
critest)
	# On its own line: a failure within the arguments below would not end the script.
	debs=$("$root/hack/debs.sh")
	go build -o "$out/hack/critest" ./cmd/critest
	exec "$out/hack/critest" -debs "$debs" -known cmd/critest/specs.txt ${FOCUS:+-focus "$FOCUS"} ${SEED:+-seed "$SEED"}
	;;
*) die "\"$what\" is none of run, e2e, race, cases, soak, bench, bench-storm, critest, node, test-node, timeline" ;;
esac
