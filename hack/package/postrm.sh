#!/bin/sh
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
set -e

config=/etc/containerd/config.toml

if [ -d /run/systemd/system ]; then
	systemctl --system daemon-reload >/dev/null || true
fi
[ "$1" = purge ] || exit 0
if [ -x /usr/bin/deb-systemd-helper ]; then
	deb-systemd-helper purge containerd.service >/dev/null || true
	deb-systemd-helper unmask containerd.service >/dev/null || true
fi
# Ours, and nobody has changed it.
if head -n 1 "$config" 2>/dev/null | grep -qx '# Made by the containerd package; yours to change.' &&
	[ "$(tail -n +2 "$config" | sha256sum)" = "@CONFIG_SUM@  -" ]; then
	rm -f "$config"
	rmdir --ignore-fail-on-non-empty /etc/containerd
fi
