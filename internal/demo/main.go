// Command demo shows on a real PostgreSQL how the usual ways of keeping "at most one pending request per
// user" break under two requests at once, and that latchkey's does not.
//
// It starts a server of its own, runs every experiment of internal/racelab, and exits with status 1 when
// one of them did not come out as it must.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/latchkey-go/latchkey/internal/pgserver"
	"github.com/latchkey-go/latchkey/internal/racelab"
)

// experimentsBudget keeps the whole demo under 30 s even when something hangs. Together the experiments
// take about two seconds.
const experimentsBudget = 25 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}

// run returns the exit status: 1 when something is not as it must be, 2 for a wrong command line, and
// the shell's 130 when it was interrupted.
func run(ctx context.Context, args []string, stdout, stderr *os.File) int {
	o, err := parseOptions(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}

	err = demo(ctx, o, stdout, stderr)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "demo: interrupted")
		return 130
	case err != nil:
		fmt.Fprintf(stderr, "demo: %v\n", err)
		return 1
	}
	return 0
}

type options struct {
	json      bool
	timelines []string // names of experiments
}

func parseOptions(args []string, stderr io.Writer) (options, error) {
	var all []string
	for _, e := range racelab.All() {
		all = append(all, e.Name)
	}

	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(stderr)
	asJSON := flags.Bool("json", false, "print one JSON object on stdout, and the progress on stderr")
	timelines := flags.String("timeline", "check-then-insert,advisory-lock",
		"the `experiments` to print a timeline of, separated by commas; or all, or none")
	if err := flags.Parse(args); err != nil {
		return options{}, err
	}

	o := options{json: *asJSON}
	switch *timelines {
	case "none", "":
	case "all":
		o.timelines = all
	default:
		o.timelines = strings.Split(*timelines, ",")
	}
	var wrong string
	for _, name := range o.timelines {
		if !slices.Contains(all, name) {
			wrong = fmt.Sprintf("there is no experiment %q to print a timeline of; there are:\n  %s", name, strings.Join(all, "\n  "))
		}
	}
	if flags.NArg() > 0 {
		wrong = fmt.Sprintf("unexpected argument %q", flags.Arg(0))
	}
	if wrong != "" {
		fmt.Fprintln(stderr, "demo:", wrong)
		return options{}, errors.New(wrong)
	}
	return o, nil
}

// outcome is an experiment and what became of it in this run.
type outcome struct {
	experiment racelab.Experiment
	result     racelab.Result
	timeline   racelab.Timeline
	err        error // why it is not as it must be
}

// report is what -json prints.
type report struct {
	Server      string           `json:"server"`
	Provider    string           `json:"provider"`
	Experiments []racelab.Result `json:"experiments"`
}

func demo(ctx context.Context, o options, stdout, stderr *os.File) (err error) {
	p := newPrinter(stdout)
	if o.json {
		p = newPrinter(stderr)
	}

	p.intro()
	server, err := pgserver.Start(ctx, pgserver.Options{Log: p.progress})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	url, drop, err := server.NewDatabase(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, drop(context.WithoutCancel(ctx))) }()

	p.howItWorks()
	outcomes, err := runAll(ctx, p, url)
	if err != nil {
		return err
	}

	r := report{Server: "PostgreSQL " + server.Version(), Provider: server.Provider()}
	for _, x := range outcomes {
		r.Experiments = append(r.Experiments, x.result)
	}
	if o.json {
		if err := json.NewEncoder(stdout).Encode(r); err != nil {
			return err
		}
	} else {
		for _, name := range o.timelines {
			i := slices.IndexFunc(outcomes, func(x outcome) bool { return x.experiment.Name == name })
			p.timeline(outcomes[i])
		}
		p.table(r.Server, outcomes)
	}
	return verdict(p, outcomes)
}

// runAll returns an error only when it was interrupted; that an experiment went wrong is in its outcome.
func runAll(ctx context.Context, p *printer, url string) ([]outcome, error) {
	budget, cancel := context.WithTimeout(ctx, experimentsBudget)
	defer cancel()

	var outcomes []outcome
	for _, e := range racelab.All() {
		p.experiment(e)
		x := outcome{experiment: e}
		x.result, x.timeline, x.err = e.Run(budget, url)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if x.err == nil {
			x.err = e.Check(x.result)
		}
		outcomes = append(outcomes, x)
	}
	return outcomes, nil
}

// verdict returns an error that names every experiment that did not come out as it must, and why.
func verdict(p *printer, outcomes []outcome) error {
	var wrong []string
	broke := 0
	for _, x := range outcomes {
		if x.err != nil {
			wrong = append(wrong, x.err.Error())
		}
		if x.experiment.Breaks() {
			broke++
		}
	}
	if wrong != nil {
		return fmt.Errorf("%d of %d experiments did not come out as they must:\n  %s",
			len(wrong), len(outcomes), strings.Join(wrong, "\n  "))
	}
	p.allAsTheyMust(broke, len(outcomes)-broke)
	return nil
}
