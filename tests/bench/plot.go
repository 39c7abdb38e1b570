package main

import (
	"cmp"
	"fmt"
	"image/color"
	"math"
	"path/filepath"
	"slices"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// plot draws the three plots that show the whole.
func (r results) plot(folder string) error {
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
	plotter.DefaultFont = plot.DefaultFont
	var times, counts []string
	for _, rtt := range rtts {
		times = append(times, rttName(rtt))
	}
	for _, n := range callerCounts {
		counts = append(counts, fmt.Sprint(n))
	}
	return cmp.Or(
		r.chart(filepath.Join(folder, "hot-key-by-rtt.svg"),
			fmt.Sprintf("One hot key, %d callers", hotCallers), "network round-trip time", times,
			func(name string, i int) figure { return r.figure(hotKey, rtts[i], hotCallers, name) }),
		r.chart(filepath.Join(folder, "hot-key-by-callers.svg"),
			"One hot key, round-trip time 1 ms", "callers", counts,
			func(name string, i int) figure { return r.figure(hotKey, time.Millisecond, callerCounts[i], name) }),
		r.chart(filepath.Join(folder, "fresh-keys-by-rtt.svg"),
			fmt.Sprintf("A fresh key per call, %d callers", freshCallers), "network round-trip time", times,
			func(name string, i int) figure { return r.figure(freshKeys, rtts[i], freshCallers, name) }),
	)
}

var (
	ours    = color.RGBA{R: 0xd9, G: 0x48, B: 0x0f, A: 0xff}
	rivals  = color.RGBA{R: 0x18, G: 0x64, B: 0xab, A: 0xff}
	theRest = color.RGBA{R: 0x86, G: 0x8e, B: 0x96, A: 0xff}
)

// lineOf returns how a contestant is drawn: latchkey in bold, the two that are hardest to beat in a colour.
func lineOf(name string) draw.LineStyle {
	switch name {
	case coalescing:
		return draw.LineStyle{Color: ours, Width: vg.Points(3.5)}
	case alone:
		return draw.LineStyle{Color: ours, Width: vg.Points(2.5), Dashes: []vg.Length{vg.Points(7), vg.Points(4)}}
	case function, unguarded:
		return draw.LineStyle{Color: rivals, Width: vg.Points(1.5)}
	default:
		return draw.LineStyle{Color: theRest, Width: vg.Points(1)}
	}
}

// chart draws accepted calls per second, on a logarithmic scale, for every contestant that was measured at every tick.
// The names stand at the ends of the lines.
func (r results) chart(path, title, axis string, ticks []string, at func(name string, tick int) figure) error {
	p := plot.New()
	p.Title.Text = title + ": accepted calls per second"
	p.Title.TextStyle.Font.Size = vg.Points(15)
	p.Title.Padding = vg.Points(8)
	p.X.Label.Text, p.X.Min, p.X.Max = axis, 0, float64(len(ticks)-1)*1.45 // with room for the names
	p.Y.Scale = plot.LogScale{}
	var marks plot.ConstantTicks
	for i, t := range ticks {
		marks = append(marks, plot.Tick{Value: float64(i), Label: t})
	}
	p.X.Tick.Marker = marks
	p.Add(plotter.NewGrid())

	var names plotter.XYLabels
	var styles []color.Color
	lowest, highest := math.Inf(1), 0.0
	for _, name := range compared {
		var points plotter.XYs
		for i := range ticks {
			f := at(name, i)
			if f.Accepted > 0 {
				points = append(points, plotter.XY{X: float64(i), Y: f.Accepted})
				lowest, highest = min(lowest, f.Accepted), max(highest, f.Accepted)
			}
		}
		if len(points) != len(ticks) {
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return err
		}
		line.LineStyle = lineOf(name)
		dots.GlyphStyle = draw.GlyphStyle{Color: line.Color, Radius: line.Width + vg.Points(1), Shape: draw.CircleGlyph{}}
		p.Add(line, dots)
		names.XYs = append(names.XYs, plotter.XY{X: points[len(points)-1].X + float64(len(ticks))/50, Y: points[len(points)-1].Y})
		names.Labels = append(names.Labels, name)
		styles = append(styles, line.Color)
	}
	if len(names.Labels) == 0 {
		return fmt.Errorf("%s: nobody was measured at every tick", title)
	}
	p.Y.Min, p.Y.Max = lowest/1.3, highest*1.3
	p.Y.Tick.Marker = decades(p.Y.Min, p.Y.Max)
	apart(names.XYs, math.Pow(p.Y.Max/p.Y.Min, 0.045))
	labels, err := plotter.NewLabels(names)
	if err != nil {
		return err
	}
	for i := range labels.TextStyle {
		labels.TextStyle[i].Color = styles[i]
		labels.TextStyle[i].YAlign = draw.YCenter
		labels.TextStyle[i].Font.Size = vg.Points(11)
	}
	p.Add(labels)
	return p.Save(9*vg.Inch, 5*vg.Inch, path)
}

// decades are ticks that name 1, 2 and 5 of every power of ten.
func decades(low, high float64) (ticks plot.ConstantTicks) {
	for power := 1.0; power <= high; power *= 10 {
		for _, n := range []float64{1, 2, 5} {
			if v := n * power; v >= low && v <= high {
				ticks = append(ticks, plot.Tick{Value: v, Label: fmt.Sprintf("%.0f", v)})
			}
		}
	}
	return ticks
}

// apart moves names up until each is at least the factor above the next, so that all can be read.
func apart(names plotter.XYs, factor float64) {
	order := make([]int, len(names))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(names[a].Y, names[b].Y) })
	for n := 1; n < len(order); n++ {
		below := names[order[n-1]].Y
		names[order[n]].Y = max(names[order[n]].Y, below*factor)
	}
}
