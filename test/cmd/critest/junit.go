// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/xml"
	"fmt"
	"os"
	"strings"
)

// outcome is how a spec ended.
type outcome string

const (
	passed  outcome = "pass"
	failed  outcome = "fail"
	skipped outcome = "skip"
	// missing is said of a spec that a run did not have.
	missing outcome = "missing"
)

// spec is one spec of one run.
type spec struct {
	outcome outcome
	// message is why it failed, or why it skipped itself.
	message string
	// filtered is true when it did not run because it was not asked for.
	filtered bool
}

// parseJUnit reads what ginkgo reports. Nodes that are no specs, such as the
// suite's own set-up, count only when they fail.
func parseJUnit(data []byte) (map[string]spec, error) {
	var report struct {
		Suites []struct {
			Cases []struct {
				Name    string `xml:"name,attr"`
				Status  string `xml:"status,attr"`
				Failure *struct {
					Message string `xml:"message,attr"`
				} `xml:"failure"`
				Error *struct {
					Message string `xml:"message,attr"`
				} `xml:"error"`
				Skipped *struct {
					Message string `xml:"message,attr"`
				} `xml:"skipped"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(data, &report); err != nil {
		return nil, err
	}
	specs := map[string]spec{}
	for _, s := range report.Suites {
		for _, c := range s.Cases {
			name, isSpec := strings.CutPrefix(c.Name, "[It] ")
			var r spec
			switch c.Status {
			case "passed":
				r.outcome = passed
			case "skipped", "pending":
				r.outcome = skipped
				if c.Skipped != nil {
					r.message = strings.TrimPrefix(c.Skipped.Message, "skipped - ")
				}
				r.filtered = c.Status == "skipped" && r.message == "skipped"
			default: // failed, timedout, panicked, interrupted, aborted
				r.outcome = failed
				if r.message = c.Status; c.Failure != nil {
					r.message = c.Failure.Message
				} else if c.Error != nil {
					r.message = c.Error.Message
				}
			}
			if !isSpec && r.outcome != failed {
				continue
			}
			if _, twice := specs[name]; twice {
				return nil, fmt.Errorf("two specs are called %q", name)
			}
			specs[name] = r
		}
	}
	if len(specs) == 0 {
		return nil, fmt.Errorf("no specs in it")
	}
	return specs, nil
}

func readJUnit(path string) (map[string]spec, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("critest wrote no report: %w", err)
	}
	specs, err := parseJUnit(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return specs, nil
}
