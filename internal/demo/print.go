package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/latchkey-go/latchkey/internal/racelab"
)

// The colours are of the sixteen that every terminal has, so that its owner's theme decides.
const (
	bold  = "1"
	dim   = "2"
	red   = "31"
	green = "32"
)

var nameWidth = func() (width int) {
	for _, e := range racelab.All() {
		width = max(width, len(e.Name))
	}
	return width
}()

// printer writes the demo's output for people.
type printer struct {
	w      io.Writer
	colour bool
}

// newPrinter uses colour on a terminal, unless NO_COLOR is set (https://no-color.org).
func newPrinter(f *os.File) *printer {
	info, err := f.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	return &printer{w: f, colour: terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
}

func (p *printer) paint(colour, text string) string {
	if !p.colour || text == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

func (p *printer) printf(format string, args ...any) { fmt.Fprintf(p.w, format, args...) }

func (p *printer) intro() {
	p.printf("%s\n\n", p.paint(bold, "latchkey demo: one pending request per user, and two requests at once"))
	p.progress("looking for a PostgreSQL server, and waiting until it is ready")
}

// progress prints a line on what is going on, and what is waited for.
func (p *printer) progress(format string, args ...any) {
	p.printf("%s\n", p.paint(dim, fmt.Sprintf(format, args...)))
}

func (p *printer) howItWorks() {
	p.printf(`
Every experiment runs real requests on connections of their own. It holds each between its check and its
insert until pg_locks shows that all the others have checked too, or wait. So it needs no luck: what can
break, breaks every time.

`)
}

func (p *printer) experiment(e racelab.Experiment) {
	p.printf("  %-*s  %s\n", nameWidth, e.Name, p.paint(dim, e.Summary))
}

func (p *printer) timeline(x outcome) {
	colour := green
	if x.experiment.Breaks() {
		colour = red
	}
	p.printf("\n%s\n%s\n", p.paint(bold, x.experiment.Name), x.experiment.Summary)

	var callers []string
	width := len("request A")
	for _, event := range x.timeline {
		if event.Caller == "" {
			continue
		}
		width = max(width, utf8.RuneCountInString(event.Text))
		if !slices.Contains(callers, event.Caller) {
			callers = append(callers, event.Caller)
		}
	}
	slices.Sort(callers)

	line := "t(ms)"
	for _, caller := range callers {
		line += fmt.Sprintf("   %-*s", width, "request "+caller)
	}
	p.printf("%s\n", p.paint(dim, strings.TrimRight(line, " ")))
	for _, event := range x.timeline {
		at := fmt.Sprintf("%5.1f   ", float64(event.At.Microseconds())/1000)
		if event.Caller == "" {
			p.printf("%s%s\n", at, p.paint(dim, "-- "+event.Text+" --"))
			continue
		}
		column := slices.Index(callers, event.Caller)
		p.printf("%s%s%s\n", at, strings.Repeat(" ", column*(width+len("   "))), event.Text)
	}
	p.printf("        %s\n", p.paint(colour, rowsAfterwards(x.result)))
}

func rowsAfterwards(r racelab.Result) string {
	text := fmt.Sprintf("%d pending for a limit of %d: the rule ", r.Rows, r.Limit)
	switch {
	case r.Holds:
		return text + "holds"
	case r.Rows <= r.Limit:
		return text + "holds, but the lock did not end with its transaction"
	default:
		return text + "is broken"
	}
}

func (p *printer) table(server string, outcomes []outcome) {
	p.printf("\n%s\n", p.paint(bold, server))
	p.printf("%s\n", p.paint(dim, fmt.Sprintf("%-*s %8s %6s %8s %8s %5s %7s %5s   %s",
		nameWidth, "experiment", "callers", "limit", "created", "refused", "busy", "errors", "rows", "does the rule hold?")))
	for _, x := range outcomes {
		r := x.result
		holds, colour := "yes", green
		if !r.Holds {
			holds, colour = "NO", red
		}
		note := ""
		if x.err != nil {
			note = p.paint(red, "   <- not as it must be")
		} else if x.experiment.Breaks() {
			note = p.paint(dim, "   as it must: the way is broken")
		}
		p.printf("%-*s %8d %6d %8d %8d %5d %7d %5d   %s%s\n",
			nameWidth, r.Name, r.Callers, r.Limit, r.Created, r.Refused, r.Busy, r.Errors, r.Rows, p.paint(colour, holds), note)
	}
}

func (p *printer) allAsTheyMust(broke, held int) {
	p.printf("\n%s\n", p.paint(green, fmt.Sprintf("All %d came out as they must: %d broke, %d held.", broke+held, broke, held)))
}
