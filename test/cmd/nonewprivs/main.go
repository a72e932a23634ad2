// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nonewprivs is installed setuid root in an image for critest and
// tells whether that had an effect.
package main

import (
	"fmt"
	"os"
)

func main() { fmt.Println("Effective uid:", os.Geteuid()) }
