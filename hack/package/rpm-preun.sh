#!/bin/sh
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0

# A removal, not an upgrade. Pods and their shims go on (KillMode=process).
if [ "$1" = 0 ] && command -v systemctl >/dev/null; then
	systemctl --no-reload disable --now containerd.service >/dev/null 2>&1 || :
fi
