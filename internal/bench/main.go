// Command bench measures the product against bare programs that do the same work, in one run on one machine, and prints
// ratios. CPU is user and system time of the named process; a ratio is taken inside a round, with the order of the two
// sides alternating, and the median of the rounds is printed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// bench is one run: where the binaries are, how much work to do, and where the tables go.
type bench struct {
	bin       string // folder of the three binaries
	versitygw string // the S3 server that the registry table is about; empty: it is about the disk
	dir       string // scratch
	size      int64  // bytes of a large blob
	rounds    int
	pushes    int // manifests in the filled repository of the index table
	out       io.Writer
	client    *client
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) > 0 && args[0] == "bare" {
		return serveBare(ctx, args[1:])
	}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	bin := fs.String("bin", ".bin", "folder of the three binaries")
	s3 := fs.String("s3", "", "versitygw: compare a store on S3 with one on disk, in the registry table alone")
	full := fs.Bool("full", false, "the sizes that the goals name: 1 GiB blobs, 7 rounds, 10,000 manifests")
	if err := fs.Parse(args); err != nil {
		return err
	}
	b := &bench{size: 256 << 20, rounds: 5, pushes: 5000, out: out, client: newClient()}
	if *full {
		b.size, b.rounds, b.pushes = 1<<30, 7, 10000
	}
	dir, err := os.MkdirTemp("", "kiln-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if b.bin, err = filepath.Abs(*bin); err != nil {
		return err
	}
	if *s3 != "" {
		if b.versitygw, err = filepath.Abs(*s3); err != nil {
			return err
		}
	}
	b.dir = dir
	return b.tables(ctx, fs.Args())
}

type table struct {
	name string
	rows func(context.Context) ([]row, error)
}

func (b *bench) tables(ctx context.Context, names []string) error {
	all := []table{{"identity", b.identity}, {"registry", b.registry}, {"index", b.index}}
	if b.versitygw != "" {
		all = []table{{"registry", b.s3}}
	}
	known := 0
	for _, t := range all {
		if len(names) > 0 && !slices.Contains(names, t.name) {
			continue
		}
		known++
		before := load()
		rows, err := t.rows(ctx)
		if err != nil {
			return fmt.Errorf("bench %s: %w", t.name, err)
		}
		b.print(t.name, before, rows)
	}
	if known < len(names) {
		return errors.New("want identity, registry, index or nothing for all; only registry with an S3 server")
	}
	return nil
}

// row is one line of a table. Ratios have no unit. A row without a goal is for reading.
type row struct {
	what  string
	value float64
	unit  string
	goal  string
	met   bool
	notes string
}

func (b *bench) print(name, before string, rows []row) {
	fmt.Fprintf(b.out, "\n%s: %d cores, %s, blobs of %d MiB, %d rounds, load %s before, %s after\n\n", name,
		runtime.NumCPU(), runtime.Version(), b.size>>20, b.rounds, before, load())
	w := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "measure\tvalue\tgoal\t\tnotes")
	for _, r := range rows {
		met := "met"
		switch {
		case r.goal == "":
			met = ""
		case !r.met:
			met = "MISSED"
		}
		fmt.Fprintf(w, "%s\t%.2f%s\t%s\t%s\t%s\n", r.what, r.value, r.unit, r.goal, met, r.notes)
	}
	w.Flush()
}

// atMost is a row whose value must not exceed limit.
func atMost(what string, value, limit float64, unit, notes string) row {
	return row{what, value, unit, fmt.Sprintf("<= %.2f", limit), value <= limit, notes}
}

// atMost gives a row its goal.
func (r row) atMost(limit float64) row {
	return atMost(r.what, r.value, limit, r.unit, r.notes)
}

// load returns the three load averages, so that a reader can judge how quiet the machine was.
func load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}

// median returns the middle of vs, which it sorts, and its lowest and highest value as text.
func median(vs []float64) (float64, string) {
	slices.Sort(vs)
	return vs[len(vs)/2], fmt.Sprintf("%.2f to %.2f", vs[0], vs[len(vs)-1])
}
