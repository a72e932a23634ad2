# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034 # most variables are for the scripts that source this
#
# Sourced by the scripts beside it. Everything they make goes under _output.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
out=$root/_output
script=hack/$(basename "$0")

# A caller's settings must not change what is built: -mod=vendor, a workspace, a git hook's GIT_DIR.
# GOFLAGS is set, not emptied, because an empty one falls back to "go env -w".
export GOFLAGS=-buildvcs=false GOWORK=off
# The same instructions for every builder, whatever the machine at hand offers.
export GOAMD64=v1 GOARM64=v8.0
unset GOEXPERIMENT GOFIPS140 GODEBUG
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY

die() {
	echo "$script: $*" >&2
	exit 1
}

say() { echo "==> $*" >&2; }

# need_go VERSION: a go command at least that new, or one that can fetch it.
need_go() {
	command -v go >/dev/null || die "go is not in PATH: install Go $1 or newer from https://go.dev/dl"
	local have
	have=$(cd / && GOTOOLCHAIN=local go env GOVERSION)
	have=${have#go}
	[ "$(printf '%s\n%s\n' "$1" "${have%% *}" | sort -V | head -n 1)" = "$1" ] && return
	[ "$(go env GOTOOLCHAIN)" = local ] &&
		die "go $have is too old: install Go $1 or newer, or unset GOTOOLCHAIN=local"
	export GOTOOLCHAIN=go$1+auto
}

# need CMD...: programs that hack/deps.sh installs.
need() {
	local c
	for c; do
		command -v "$c" >/dev/null || die "$c is not installed: run hack/deps.sh as root"
	done
}

# all_lines: the supported lines, oldest first.
all_lines() {
	local f
	for f in "$root"/patches/*/BASE; do basename "$(dirname "$f")"; done | sort -V
}

# use_line LINE: sets line, its patches folder, its trees and what BASE says.
use_line() {
	local lines
	lines=$(all_lines | paste -sd ' ')
	[ -n "${1-}" ] || die "which line? supported: $lines"
	case $1 in */* | .*) die "no line \"$1\": supported are $lines" ;; esac
	[ -f "$root/patches/$1/BASE" ] || die "no line \"$1\": supported are $lines"
	line=$1
	patches=$root/patches/$line
	tree=$out/src/$line
	module=$(base MODULE) version=$(base VERSION) sum=$(base SUM) base_go=$(base GO) release=$(base RELEASE)
	revision=$(base COMMIT)
	revision=${revision:-$sum}
	need_go "$base_go"
	# Another Go version makes other bytes.
	[ "$(go env GOTOOLCHAIN)" = local ] || export GOTOOLCHAIN=go$base_go
	mkdir -p "$out/src"
}

# library_commit: the newest commit that changed what this checkout adds to the line's binaries, with "-dirty" when
# there are changes in no commit. CNIRELOAD_COMMIT says it where there is no git.
library_commit() {
	local c in=(go.mod cnireload cri groupcommit internal status "patches/$line" ':!*_test.go' ':!internal/testenv' ':!patches/*/CHECKSUMS')
	c=${CNIRELOAD_COMMIT-}
	if [ -z "$c" ] && c=$(tgit "$root" log -1 --format=%H -- "${in[@]}" 2>/dev/null) && [ -n "$c" ]; then
		c=${c:0:12}
		[ -z "$(tgit "$root" status --porcelain -- "${in[@]}")" ] || c+=-dirty
	fi
	echo "${c:-unknown}"
}

# base KEY: a value of the line's BASE.
base() { sed -n "s/^$1=//p" "$patches/BASE"; }

# series: the line's patches in order.
series() { sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e '/^$/d' "$patches/series"; }

# How containerd, ctr and, with no_grpc, the shim are built.
tags=urfave_cli_no_docs,static_build,netgo,osusergo

# ldflags VERSION REVISION [PACKAGE]: what the programs say of themselves.
ldflags() {
	local pkg=$module/version
	echo "-s -w -buildid= -X $pkg.Version=$1 -X $pkg.Package=${3:-github.com/cnireload/cnireload} -X $pkg.Revision=$2"
}

# package_epoch: the date of packages, which is that of the newest patch, never of the clock.
package_epoch() {
	local newest
	newest=$(for p in $(series); do sed -n 's/^Last-Update: //p' "$patches/$p"; done | sort | tail -n 1)
	date -u -d "${newest:-2026-10-13}" +%s
}

# inputs_hash: changes when, and only when, another tree would come out of apply.
inputs_hash() {
	(
		cd "$patches" || exit 1
		base SUM
		# shellcheck disable=SC2046 # file names of patches hold no blanks
		cat $(series) /dev/null
	) | sha256sum | cut -d ' ' -f 1
}

# tgit DIR ARGS...: git that no configuration of the user's can change.
tgit() {
	local dir=$1
	shift
	GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null \
		GIT_COMMITTER_NAME=cnireload GIT_COMMITTER_EMAIL=cnireload@invalid \
		git -C "$dir" -c safe.directory="$dir" -c core.hooksPath=/dev/null -c core.autocrlf=false -c gc.auto=0 -c advice.detachedHead=false "$@"
}

# lock NAME: one script at a time; the others wait.
lock() {
	mkdir -p "$out"
	exec 9>"$out/.lock-$1"
	flock -n 9 || {
		say "waiting for another run that holds _output/.lock-$1"
		flock 9
	}
}

# scratch: a folder beside the results (so that a rename is atomic), gone when the script ends.
scratch() {
	mkdir -p "$out/tmp"
	tmp=$(mktemp -d "$out/tmp/XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
}

# go_failed WHAT LOG: ends with one line when the go command could not download, else with all it said.
go_failed() {
	local why
	if why=$(grep -m 1 -E 'GOPROXY=off|dial tcp|no such host|i/o timeout|connection re|TLS handshake|reading https?:|proxyconnect' "$2"); then
		die "cannot download what $1 needs (is the network there, is GOPROXY right?): ${why#$'\t'}"
	fi
	grep -v '^go: downloading' "$2" >&2
	die "$1 does not build: see above"
}

# hackgo CMD ARGS...: a program of hack/cmd, built when it has changed.
hackgo() {
	local cmd=$1
	shift
	mkdir -p "$out/hack"
	# For this machine, also when GOARCH names the one to build for.
	GOOS='' GOARCH='' CGO_ENABLED=0 go -C "$root/hack" build -o "$out/hack/$cmd" "./cmd/$cmd" 2>"$out/hack/$cmd.log" ||
		go_failed "hack/cmd/$cmd" "$out/hack/$cmd.log"
	"$out/hack/$cmd" "$@"
}

# progress TOTAL: reads "go build -v", says how far it is every few seconds, passes on all else.
progress() {
	local n=0 last=$SECONDS l
	while IFS= read -r l; do
		if [[ $l =~ ^[A-Za-z0-9._~/-]+$ ]]; then
			n=$((n + 1))
			if ((SECONDS - last >= 5)); then
				last=$SECONDS
				echo "    compiled $n of at most $1 packages" >&2
			fi
		else
			printf '%s\n' "$l" >&2
		fi
	done
}

# link_library DIR: has upstream's sources in DIR use this checkout. The path is relative: the build
# records it in the binaries, which must not depend on where the checkout is. It is part of the base
# commit, so that it is never part of a patch.
link_library() {
	(cd "$1" && go mod edit -require=github.com/cnireload/cnireload@v0.0.0 \
		-replace=github.com/cnireload/cnireload=../../..) || die "cannot edit go.mod of $module"
}

# commit_base DIR MESSAGE: commits all of DIR, the same commit every time.
commit_base() {
	tgit "$1" add -A -f
	GIT_AUTHOR_NAME=cnireload GIT_AUTHOR_EMAIL=cnireload@invalid \
		GIT_AUTHOR_DATE='2000-01-01T00:00:00Z' GIT_COMMITTER_DATE='2000-01-01T00:00:00Z' \
		tgit "$1" commit -q -m "$2"
}

# pin VERSION: what BASE says for that version of the line's module. The sum is checked against the
# checksum database by the go command, unless GONOSUMDB or GOFLAGS say otherwise.
pin() {
	local info
	info=$(cd / && go mod download -json "$module@$1") || die "cannot download $module@$1: $(sed -n 's/.*"Error": "\(.*\)".*/\1/p' <<<"$info")"
	field() { sed -n "s/.*\"$1\": \"\(.*\)\".*/\1/p" <<<"$info"; }
	grep '^#' "$patches/BASE" || true
	printf '%s\n' "MODULE=$module" "VERSION=$1" "SUM=$(field Sum)" COMMIT= \
		"GO=$(printf '%s\n' "$base_go" "$(sed -n 's/^go //p' "$(field GoMod)")" | sort -V | tail -n 1)" RELEASE=1
}

# commit_upstream TREE BASE DIR: adds the sources that BASE pins to the repository TREE as a commit
# without parents, and prints its name. DIR is for the sources.
commit_upstream() {
	local v
	v=$(sed -n 's/^VERSION=//p' "$2")
	hackgo source -module "$module" -version "$v" -sum "$(sed -n 's/^SUM=//p' "$2")" -dir "$3" >&2
	link_library "$3"
	tgit "$3" init -q -b new 2>/dev/null
	commit_base "$3" "$module $v"
	tgit "$1" fetch -q "$3" HEAD
	tgit "$1" rev-parse FETCH_HEAD
}

# apply_to DIR [LOOSE]: makes DIR, a git repository with upstream's sources as the one commit
# refs/cnireload/base and a commit for each patch.
apply_to() {
	local dir=$1 loose=${2-} p
	"$root/hack/fetch.sh" "$line" "$dir" || exit 1
	link_library "$dir"
	tgit "$dir" init -q -b "$line" 2>/dev/null
	commit_base "$dir" "$module $version"
	tgit "$dir" update-ref refs/cnireload/base HEAD
	for p in $(series); do
		[ -f "$patches/$p" ] || die "patches/$line/series names $p, which does not exist"
		tgit "$dir" am -q --committer-date-is-author-date --whitespace=nowarn "$patches/$p" >"$dir/.git/am.log" 2>&1 ||
			die "$p does not apply to $version: $(grep -m 1 '^error:' "$dir/.git/am.log" || tail -n 1 "$dir/.git/am.log")"
	done
	# "git am" accepts offsets. What it made shows them: written back, the line numbers differ.
	if [ -z "$loose" ]; then
		export_patches "$dir" "$dir/.git/export"
		for p in $(series); do
			cmp -s "$patches/$p" "$dir/.git/export/$p" ||
				die "$p applies to $version only with an offset, or is not in the form that hack/refresh.sh writes: run hack/apply.sh --force --loose $line, look, then hack/refresh.sh $line"
		done
		rm -rf "$dir/.git/export"
	fi
	mark_applied "$dir"
}

# export_patches TREE DIR: the tree's commits as patch files in DIR, the same bytes every time.
# A subject that has a patch already keeps its number; others get the next one.
export_patches() {
	local from=$1 to=$2 n=0 c made old
	mkdir -p "$to"
	for c in $(tgit "$from" rev-list --reverse refs/cnireload/base..HEAD); do
		made=$(tgit "$from" -c diff.algorithm=myers format-patch -1 --start-number=1 -o "$to/new" --zero-commit --no-numbered \
			--no-signature --abbrev=12 --no-renames -U3 --src-prefix=a/ --dst-prefix=b/ "$c")
		made=$(basename "$made")
		n=$((n + 1))
		for old in "$patches"/[0-9][0-9][0-9][0-9]"${made:4}"; do
			[ -e "$old" ] || break
			old=$(basename "$old")
			((10#${old:0:4} < n)) || n=$((10#${old:0:4}))
			break
		done
		mv "$to/new/$made" "$to/$(printf %04d "$n")${made:4}"
	done
	rm -rf "$to/new"
}

# matrix: what patches/README.md must say.
matrix() {
	# shellcheck disable=SC2046 # names of lines hold no blanks
	hackgo patchlint -matrix "$root/patches" $(all_lines)
}

# mark_applied DIR: remembers that DIR is what the patches make.
mark_applied() { echo "$(inputs_hash) $(tgit "$1" rev-parse HEAD)" >"$1/.git/cnireload-applied"; }

# applied_key DIR: the inputs_hash that DIR was made from.
applied_key() { cut -d ' ' -f 1 "$1/.git/cnireload-applied" 2>/dev/null || true; }

# dirty DIR: what is in no commit.
dirty() { tgit "$1" status --porcelain; }

# edited DIR: whether DIR has changed since mark_applied.
edited() {
	[ "$(tgit "$1" rev-parse HEAD)" != "$(cut -d ' ' -f 2 "$1/.git/cnireload-applied" 2>/dev/null)" ] ||
		[ -n "$(dirty "$1")" ]
}
