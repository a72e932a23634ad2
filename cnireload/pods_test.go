// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package cnireload

import (
	"fmt"
	"testing"
)

func TestPodStatesAreBounded(t *testing.T) {
	var p podStates
	for i := range maxPodStates {
		p.put(fmt.Sprint(i), podState{interfaces: []string{fmt.Sprint(i)}})
	}
	p.put("0", podState{removed: true}) // "1" has changed longest ago now
	p.put("new", podState{removed: true})
	last := fmt.Sprint(maxPodStates - 1)
	if len(p.states) != maxPodStates || len(p.order) != maxPodStates ||
		!p.get("0").removed || p.get("1").interfaces != nil || p.get(last).interfaces[0] != last {
		t.Errorf("%d states, %d in order", len(p.states), len(p.order))
	}
	p.forget(last)
	p.forget("never there")
	if len(p.states) != maxPodStates-1 || len(p.order) != maxPodStates-1 || p.get(last).interfaces != nil {
		t.Errorf("%d states, %d in order after one was forgotten", len(p.states), len(p.order))
	}
}
