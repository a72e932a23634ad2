#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/test.sh run|e2e|cases|soak|bench|critest LINE: builds what is needed, then hands over to test/.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
what=${1-}
use_line "${2-}"
[ "$(id -u)" = 0 ] || die "needs root for mounts and network namespaces: run it with sudo"
[ "$(uname -s)" = Linux ] || die "needs Linux, this is $(uname -s)"
"$root/hack/deps.sh"
"$root/hack/build.sh" "$line" >/dev/null
[ "$what" = run ] || "$root/hack/build.sh" --stock "$line" >/dev/null
if [ "$what" = run ]; then groups=(node); else groups=(node test); fi
"$root/hack/tools.sh" "${groups[@]}" >/dev/null
cd "$root/test"
case $what in
run)
	# Built first and then run: an interrupt must reach the walkthrough itself, not "go run".
	go build -o "$out/hack/walkthrough" ./cmd/walkthrough
	exec "$out/hack/walkthrough"
	;;
e2e) exec go test -count=1 -v -timeout=60m ./e2e/... -run "${CASE:+^Test${CASE}(\$|[^0-9])}" ;;
cases)
	go build -o "$out/hack/cases" ./cmd/cases
	exec "$out/hack/cases"
	;;
soak) CNIRELOAD_SOAK=10m CNIRELOAD_SEED=${SEED-} exec go test -count=1 -v -timeout=30m ./e2e/... -run '^TestSoak$' ;;
bench)
	go build -o "$out/hack/bench" ./bench
	exec "$out/hack/bench"
	;;
critest)
	# On its own line: a failure within the arguments below would not end the script.
	debs=$("$root/hack/debs.sh")
	go build -o "$out/hack/critest" ./cmd/critest
	exec "$out/hack/critest" -debs "$debs" -known cmd/critest/specs.txt ${FOCUS:+-focus "$FOCUS"} ${SEED:+-seed "$SEED"}
	;;
*) die "\"$what\" is none of run, e2e, cases, soak, bench, critest" ;;
esac
