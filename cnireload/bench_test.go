// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package cnireload

import (
	"fmt"
	"testing"
	"time"

	gocni "github.com/containerd/go-cni"

	"github.com/cnireload/cnireload/internal/diskfile"
)

// BenchmarkLoad compares a Load with go-cni's, in turns, for so many files: one
// that finds everything as it was, which is what the poll does, and one after a
// file has changed. A ratio below 1 is in our favour.
func BenchmarkLoad(b *testing.B) {
	for _, files := range []int{1, 100, 1000} {
		for _, change := range []string{"unchanged", "one changed"} {
			b.Run(fmt.Sprintf("%d files, %s", files, change), func(b *testing.B) {
				d := newNode(b)
				d.install("fakenet")
				for i := range files {
					d.write(fmt.Sprintf("%04d.conflist", i), conflist("1.0.0", fmt.Sprintf("n%d", i), "fakenet"))
				}
				theirs, err := gocni.New(gocni.WithPluginConfDir(d.conf), gocni.WithPluginDir([]string{d.bin}), gocni.WithMinNetworkCount(1))
				d.must(err)
				ours := d.network(WithMinNetworkCount(1))
				d.must(ours.Load())
				// What was just written is not yet trusted by its stat data.
				time.Sleep(diskfile.RacyWindow + 100*time.Millisecond)
				d.must(ours.Load())
				var took [2]time.Duration
				for i := 0; b.Loop(); i++ {
					if change == "one changed" {
						b.StopTimer()
						d.write("0000.conflist", conflist("1.0.0", fmt.Sprintf("m%d", i), "fakenet"))
						b.StartTimer()
					}
					for _, who := range [][]int{{0, 1}, {1, 0}}[i%2] {
						begin := time.Now()
						if who == 0 {
							err = theirs.Load(gocni.WithDefaultConf)
						} else {
							err = ours.Load()
						}
						took[who] += time.Since(begin)
						d.must(err)
					}
				}
				per := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(b.N) }
				b.ReportMetric(0, "ns/op") // of both together: means nothing
				b.ReportMetric(per(took[0]), "go-cni-µs/load")
				b.ReportMetric(per(took[1]), "cnireload-µs/load")
				b.ReportMetric(float64(took[1])/float64(took[0]), "ratio")
			})
		}
	}
}
