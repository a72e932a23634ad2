#!/bin/sh
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
set -e

# Pods and their shims go on (KillMode=process).
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
	deb-systemd-invoke stop containerd.service >/dev/null || true
fi
