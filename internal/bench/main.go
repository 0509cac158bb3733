// Command bench measures the product against bare programs that do the same work, in one run on one machine, and prints
// ratios. CPU is user and system time of the named process; a ratio is taken inside a round, with the order of the two
// sides alternating, and the median of the rounds is printed.
package main

import (
	"context"
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

	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
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
	pushes    int      // manifests in the filled repository of the index table
	artifacts int      // in the largest index
	peers     []string // the registries of others that the registry table is also about
	out       io.Writer
	client    *rig.Client
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) > 0 && args[0] == "bare" {
		return serveBare(ctx, args[1:])
	}
	b := &bench{size: 256 << 20, rounds: 5, pushes: 5000, artifacts: 100_000, out: out, client: rig.NewClient()}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	bin := fs.String("bin", ".bin", "folder of the three binaries")
	fs.Func("peer", "a registry of the distribution project to compare with; may be repeated", b.addPeer)
	s3 := fs.String("s3", "", "versitygw: compare a store on S3 with one on disk, in the registry table alone")
	full := fs.Bool("full", false, "the sizes that the goals name: 1 GiB blobs, 7 rounds, 10,000 manifests, 10^6 artifacts")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *full {
		b.size, b.rounds, b.pushes, b.artifacts = 1<<30, 7, 10_000, 1_000_000
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

// addPeer takes the path of a peer; one that is not there is left out.
func (b *bench) addPeer(path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	if _, err := os.Stat(path); err != nil {
		fmt.Fprintf(b.out, "left out: %v\n", err)
		return nil
	}
	b.peers = append(b.peers, path)
	return nil
}

// table is a part of a run, by its own name or that of its group.
type table struct {
	name, group string
	rows        func(context.Context) ([]row, error)
}

func (b *bench) tables(ctx context.Context, names []string) error {
	all := []table{
		{"identity", "", b.identity}, {"blobs", "registry", b.blobs}, {"pushes", "registry", b.largePushes},
		{"manifests", "registry", b.manifestRates}, {"farm", "registry", b.farm}, {"index", "", b.index},
		{"find", "index", b.find},
	}
	if b.versitygw != "" {
		all = []table{{"s3", "registry", b.s3}}
	}
	known := map[string]bool{}
	for _, t := range all {
		known[t.name], known[t.group] = true, true
	}
	for _, name := range names {
		if !known[name] {
			return fmt.Errorf("no table %q: want identity, registry, blobs, pushes, manifests, farm, index, find or nothing for all; "+
				"only registry with an S3 server", name)
		}
	}
	for _, t := range all {
		if len(names) > 0 && !slices.Contains(names, t.name) && !slices.Contains(names, t.group) {
			continue
		}
		before := load()
		rows, err := t.rows(ctx)
		if err != nil {
			return fmt.Errorf("bench %s: %w", t.name, err)
		}
		if len(rows) == 0 {
			fmt.Fprintf(b.out, "\n%s: left out, there is no peer\n", t.name)
			continue
		}
		b.print(t.name, before, rows)
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

// atLeast gives a row its goal.
func (r row) atLeast(limit float64) row {
	r.goal, r.met = fmt.Sprintf(">= %.2f", limit), r.value >= limit
	return r
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
