#!/bin/sh
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
set -e

if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
	systemctl stop containerd.service || true
fi
