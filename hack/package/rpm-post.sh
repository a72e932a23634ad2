#!/bin/sh
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0

config=/etc/containerd/config.toml
if [ ! -e "$config" ] && [ ! -h "$config" ]; then
	mkdir -p /etc/containerd && cp /usr/share/containerd/config.toml "$config"
fi
# An installation, not an upgrade. Whether it is enabled is the distribution's preset.
if [ "$1" = 1 ] && command -v systemctl >/dev/null; then
	systemctl --no-reload preset containerd.service >/dev/null 2>&1 || :
fi
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload >/dev/null 2>&1 || :
fi
