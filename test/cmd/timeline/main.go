// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

// Command timeline turns what test/node has recorded of a boot, on stock and on
// patched containerd, into one picture with both on the same scales, and into a
// text.
package main

import (
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cnireload/cnireload/test/harness"
)

func main() {
	in := flag.String("in", "", "folder with stock.json and patched.json")
	out := flag.String("out", "", "folder for boot.svg and boot.txt")
	flag.Parse()
	if err := draw(*in, *out); err != nil {
		fmt.Fprintln(os.Stderr, "timeline:", err)
		os.Exit(1)
	}
}

func draw(in, out string) error {
	var runs []*harness.Run
	for _, side := range []harness.Side{harness.Stock, harness.Patched} {
		r, err := harness.LoadRun(filepath.Join(in, string(side)+".json"))
		if err != nil {
			return err
		}
		runs = append(runs, r)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	var svg, text strings.Builder
	picture(&svg, runs)
	table(&text, runs)
	for name, content := range map[string]string{"boot.svg": svg.String(), "boot.txt": text.String()} {
		if err := os.WriteFile(filepath.Join(out, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	fmt.Print(text.String())
	return nil
}

// table is the text: a line for every two seconds, both sides side by side.
func table(w io.Writer, runs []*harness.Run) {
	const step = 2.0
	fmt.Fprintf(w, "%5s", "s")
	for _, r := range runs {
		fmt.Fprintf(w, " | %-7s %4s %4s %6s %4s %4s %8s", r.Side, "pods", "host", "failed", "ADD", "DEL", "write ms")
	}
	fmt.Fprintln(w)
	for at := step; at < span(runs)+step; at += step {
		fmt.Fprintf(w, "%5.0f", at)
		for _, r := range runs {
			c := counted(r, at)
			p50, _, _ := r.Quantiles(at-step, at)
			write := "-"
			if p50 > 0 {
				write = fmt.Sprintf("%.1f", p50.Seconds()*1000)
			}
			if at-step > r.End {
				write = ""
			}
			fmt.Fprintf(w, " | %-7s %4d %4d %6d %4d %4d %8s", network(r, at), c.Pods, c.Host, until(r.Failed, at), until(r.Adds, at), until(r.Dels, at), write)
		}
		fmt.Fprintln(w)
	}
	for _, r := range runs {
		b50, b99, _ := r.Quantiles(0, r.File)
		a50, a99, _ := r.Quantiles(r.File, r.End)
		fmt.Fprintf(w, "%s: the agent's file comes at %.1fs; all %d pods run %.1fs later; %d failed sandboxes, %d ADD, %d DEL; metadata p50/p99 %d/%d ms until the file, %d/%d ms from then\n",
			r.Side, r.File, r.Pods, r.End-r.File, until(r.Failed, r.End), until(r.Adds, r.End), until(r.Dels, r.End),
			b50.Milliseconds(), b99.Milliseconds(), a50.Milliseconds(), a99.Milliseconds())
	}
}

// counted is the last count at a time.
func counted(r *harness.Run, at float64) (last harness.PodCount) {
	for _, c := range r.Count {
		if c.At <= at {
			last = c
		}
	}
	return last
}

func until(times []float64, at float64) (count int) {
	for _, t := range times {
		if t <= at {
			count++
		}
	}
	return count
}

// network is NetworkReady at a time.
func network(r *harness.Run, at float64) string {
	if at > r.End+2 {
		return ""
	}
	state := "-"
	for _, s := range r.Status {
		if s.At <= at {
			state = word(s)
		}
	}
	return state
}

func word(s harness.StatusSample) string {
	switch {
	case s.Error != "":
		return "no answer"
	case s.Ready:
		return "ready"
	}
	return "waits"
}

// span is the time both pictures show.
func span(runs []*harness.Run) (most float64) {
	for _, r := range runs {
		most = max(most, r.End)
	}
	return math.Ceil(most/5)*5 + 5
}

// The picture's measures.
const (
	left, gap  = 128.0, 50.0
	width      = 420.0
	top        = 106.0
	plotHeight = 118.0
	stripe     = 16.0
	total      = left + 2*width + gap + 24
)

// Colours that can be told apart without seeing red and green.
const (
	blue   = "#1f6fb4"
	orange = "#d9641e"
	grey   = "#8a8f98"
	light  = "#e4e7eb"
	ink    = "#22262b"
	purple = "#7b4fa3"
)

type canvas struct {
	io.Writer
	span float64
	x0   float64
}

func (c canvas) x(at float64) float64 { return c.x0 + width*min(max(at, 0), c.span)/c.span }

// tick is the distance of the marks of the time axis.
func (c canvas) tick() float64 {
	for _, t := range []float64{5, 10, 20, 50} {
		if c.span/t <= 8 {
			return t
		}
	}
	return 100
}

func (c canvas) text(x, y float64, anchor, colour string, size int, s string) {
	fmt.Fprintf(c, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s" font-size="%d">%s</text>`+"\n", x, y, anchor, colour, size, escape(s))
}

func (c canvas) line(x1, y1, x2, y2 float64, colour string, more string) {
	fmt.Fprintf(c, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" %s/>`+"\n", x1, y1, x2, y2, colour, more)
}

func (c canvas) rect(x1, y, x2, h float64, colour string) {
	if x2 > x1 {
		fmt.Fprintf(c, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n", x1, y, x2-x1, h, colour)
	}
}

// steps draws a value that keeps until the next.
func (c canvas) steps(points [][2]float64, y func(float64) float64, end float64, colour string, more string) {
	var d strings.Builder
	last := 0.0
	fmt.Fprintf(&d, "M%.1f %.1f", c.x(0), y(0))
	for _, p := range points {
		if p[1] != last {
			fmt.Fprintf(&d, "H%.1fV%.1f", c.x(p[0]), y(p[1]))
			last = p[1]
		}
	}
	fmt.Fprintf(&d, "H%.1f", c.x(end))
	fmt.Fprintf(c, `<path d="%s" fill="none" stroke="%s" stroke-width="1.8" %s/>`+"\n", d.String(), colour, more)
}

func escape(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(s)
}

// cumulative makes steps of times.
func cumulative(times []float64) (points [][2]float64) {
	sorted := slices.Sorted(slices.Values(times))
	for i, t := range sorted {
		points = append(points, [2]float64{t, float64(i + 1)})
	}
	return points
}

// plot is one row with a linear or logarithmic scale.
type plot struct {
	title  string
	legend [][2]string // words, colour
	ticks  []float64
	y      func(top, v float64) float64
	format string
	draw   func(c canvas, r *harness.Run, y func(float64) float64)
}

func picture(w io.Writer, runs []*harness.Run) {
	podTop, eventTop, addTop := 1.0, 1.0, 1.0
	for _, r := range runs {
		podTop = max(podTop, float64(r.Pods))
		eventTop = max(eventTop, float64(len(r.Failed)))
		addTop = max(addTop, float64(max(len(r.Adds), len(r.Dels))))
	}
	linear := func(most float64) func(top, v float64) float64 {
		return func(top, v float64) float64 { return top + plotHeight*(1-v/(most*1.06)) }
	}
	const low, high = 1.0, 10000.0 // ms
	logarithmic := func(top, v float64) float64 {
		v = min(max(v, low), high)
		return top + plotHeight*(1-math.Log10(v/low)/math.Log10(high/low))
	}
	plots := []plot{
		{"pods running", [][2]string{{"pod network", blue}, {"host network", purple}}, round(podTop), linear(podTop), "%.0f",
			func(c canvas, r *harness.Run, y func(float64) float64) {
				var pods, host [][2]float64
				for _, s := range r.Count {
					pods = append(pods, [2]float64{s.At, float64(s.Pods)})
					host = append(host, [2]float64{s.At, float64(s.Host)})
				}
				c.steps(pods, y, r.End, blue, "")
				c.steps(host, y, r.End, purple, `stroke-dasharray="5 3"`)
			}},
		{"failed sandboxes", [][2]string{{"kubelet's events, all so far", orange}}, round(eventTop), linear(eventTop), "%.0f",
			func(c canvas, r *harness.Run, y func(float64) float64) {
				c.steps(cumulative(r.Failed), y, r.End, orange, "")
			}},
		{"plugin runs", [][2]string{{"ADD so far", blue}, {"DEL so far", orange}}, round(addTop), linear(addTop), "%.0f",
			func(c canvas, r *harness.Run, y func(float64) float64) {
				c.steps(cumulative(r.Adds), y, r.End, blue, "")
				c.steps(cumulative(r.Dels), y, r.End, orange, `stroke-dasharray="5 3"`)
			}},
		{"metadata write", [][2]string{{"each dot is one small write, ms", grey}}, []float64{1, 10, 100, 1000, 10000}, logarithmic, "%.0f",
			func(c canvas, r *harness.Run, y func(float64) float64) {
				for _, m := range r.Metadata {
					if m.At <= r.End {
						fmt.Fprintf(c, `<circle cx="%.1f" cy="%.1f" r="1.3" fill="%s"/>`+"\n", c.x(m.At), y(m.Took*1000), ink)
					}
				}
			}},
	}
	strips := []string{"agent's file", "gate", "NetworkReady"}
	stripsTop := top
	plotsTop := stripsTop + float64(len(strips))*(stripe+8) + 30
	height := plotsTop + float64(len(plots))*(plotHeight+44) + 14

	fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" font-family="sans-serif">`+"\n", total, height)
	fmt.Fprintf(w, `<rect width="%.0f" height="%.0f" fill="white"/>`+"\n", total, height)
	for i, r := range runs {
		c := canvas{w, span(runs), left + float64(i)*(width+gap)}
		if i == 0 {
			c.text(14, 26, "start", ink, 16, fmt.Sprintf("A node boots with %d pods and %d host-network pods, and the network's agent is late", r.Pods, r.Host))
		}
		c.text(c.x0, 56, "start", ink, 15, fmt.Sprintf("%s containerd", r.Side))
		c.text(c.x0, 74, "start", grey, 12, fmt.Sprintf("the file comes after %.1f s; all pods run %.1f s later", r.File, r.End-r.File))
		c.text(c.x0, 90, "start", grey, 12, fmt.Sprintf("%d sandboxes fail; ADD runs %d times", until(r.Failed, r.End), until(r.Adds, r.End)))

		for j, name := range strips {
			y := stripsTop + float64(j)*(stripe+8)
			if i == 0 {
				c.text(left-12, y+12, "end", ink, 12, name)
			}
			c.strip(r, name, y)
		}
		for j, p := range plots {
			at := plotsTop + float64(j)*(plotHeight+44)
			y := func(v float64) float64 { return p.y(at, v) }
			for _, tick := range p.ticks {
				c.line(c.x0, y(tick), c.x0+width, y(tick), light, "")
				c.text(c.x0-6, y(tick)+4, "end", grey, 11, fmt.Sprintf(p.format, tick))
			}
			c.line(c.x0, at+plotHeight, c.x0+width, at+plotHeight, grey, "")
			for s := 0.0; s <= c.span; s += c.tick() {
				c.line(c.x(s), at+plotHeight, c.x(s), at+plotHeight+4, grey, "")
				c.text(c.x(s), at+plotHeight+16, "middle", grey, 11, fmt.Sprintf("%.0f s", s))
			}
			if i == 0 {
				c.text(14, at-10, "start", ink, 12, p.title)
				x := left
				for _, l := range p.legend {
					c.rect(x, at-18, x+10, 8, l[1])
					c.text(x+14, at-10, "start", ink, 11, l[0])
					x += 34 + 6.2*float64(len(l[0]))
				}
			}
			c.line(c.x(r.File), at, c.x(r.File), at+plotHeight, grey, `stroke-dasharray="3 3"`)
			p.draw(c, r, y)
		}
	}
	fmt.Fprintln(w, "</svg>")
}

// strip draws a state over time, with its word where there is room.
func (c canvas) strip(r *harness.Run, name string, y float64) {
	block := func(from, to float64, colour, word string) {
		c.rect(c.x(from), y, c.x(to), stripe, colour)
		if c.x(to)-c.x(from) > 12+6.5*float64(len(word)) {
			c.text((c.x(from)+c.x(to))/2, y+12, "middle", "white", 11, word)
		}
	}
	switch name {
	case "agent's file":
		block(0, r.File, orange, "missing")
		block(r.File, r.End, blue, "there")
		return
	case "gate":
		if r.Side == harness.Stock {
			block(0, r.End, grey, "stock has none")
			return
		}
	}
	of := func(s harness.StatusSample) (colour, what string) {
		if name == "gate" {
			switch s.Gate {
			case "open":
				return blue, "open"
			case "closed":
				return orange, "closed"
			}
			return grey, ""
		}
		switch {
		case s.Error != "":
			return ink, "no answer"
		case s.Ready:
			return blue, "true"
		}
		return orange, "false"
	}
	for i := 0; i < len(r.Status); {
		colour, what := of(r.Status[i])
		j := i
		for j < len(r.Status) {
			if other, _ := of(r.Status[j]); other != colour {
				break
			}
			j++
		}
		to := r.End
		if j < len(r.Status) {
			to = r.Status[j].At
		}
		from := r.Status[i].At
		if i == 0 {
			from = 0
		}
		block(from, to, colour, what)
		i = j
	}
}

// round gives a few ticks up to a value.
func round(most float64) (ticks []float64) {
	step := math.Pow(10, math.Floor(math.Log10(max(most, 1))))
	for most/step < 2.5 {
		step /= 2
	}
	if step < 1 {
		step = 1
	}
	for v := 0.0; v <= most; v += step {
		ticks = append(ticks, v)
	}
	return ticks
}
