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
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/internal/bench/bare"
	"github.com/kiln-registry/kiln-registry/internal/bench/gpuload"
	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
	"github.com/kiln-registry/kiln-registry/internal/bench/transfer"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ran, err := rig.Apart(ctx)
	if failed := new(exec.ExitError); errors.As(err, &failed) {
		os.Exit(1) // it said why
	}
	if !ran && err == nil {
		err = run(ctx, os.Args[1:], os.Stdout)
	}
	if err != nil {
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
	full      bool     // the sizes and rounds that the goals name
	tools     string   // folder of what is installed for measurements
	saved     string   // folder of the tables as JSON; empty: none
	out       io.Writer
	client    *rig.Client
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) > 0 {
		if program, ok := bare.Commands()[args[0]]; ok {
			return program(ctx, args[1:], out)
		}
	}
	b := &bench{size: 256 << 20, rounds: 5, pushes: 5000, artifacts: 100_000, out: out, client: rig.NewClient()}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	bin := fs.String("bin", ".bin", "folder of the three binaries")
	tools := fs.String("tools", ".tools", "folder of the programs to compare with")
	fs.Func("peer", "a registry of the distribution project to compare with; may be repeated", b.addPeer)
	s3 := fs.String("s3", "", "versitygw: compare a store on S3 with one on disk, in the registry table alone")
	fs.BoolVar(&b.full, "full", false,
		"the sizes that the goals name: 1 GiB blobs, 7 rounds, 10,000 manifests, 10^6 artifacts")
	rounds := fs.Int("rounds", 0, "at least 3; without it 7 with -full, else 5")
	mib := fs.Int64("mib", 0, "MiB of a large blob; without it 1024 with -full, else 256")
	fs.StringVar(&b.saved, "json", "", "folder to keep each table in, as JSON")
	page := fs.String("page", "", "measure nothing: put the tables that -json has into their places in this page")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *page != "" {
		put, left, err := report.Rewrite(*page, b.saved)
		fmt.Fprintf(out, "%s: %d tables put in place: %s\n", *page, len(put), strings.Join(put, ", "))
		if len(left) > 0 {
			fmt.Fprintf(out, "left as they were, as they were not measured in full form: %s\n", strings.Join(left, ", "))
		}
		return err
	}
	if b.full {
		b.size, b.rounds, b.pushes, b.artifacts = 1<<30, 7, 10_000, 1_000_000
	}
	if *mib > 0 {
		b.size = *mib << 20
	}
	if *rounds > 0 {
		b.rounds = max(3, *rounds)
	}
	dir, err := os.MkdirTemp("", "kiln-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b.dir = dir
	for _, folder := range []struct {
		path string
		to   *string
	}{{*bin, &b.bin}, {*tools, &b.tools}, {*s3, &b.versitygw}} {
		if folder.path == "" {
			continue
		}
		if *folder.to, err = filepath.Abs(folder.path); err != nil {
			return err
		}
	}
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

// table is a part of a run, by its own name or that of one of its groups.
type table struct {
	name   string
	groups []string
	rows   func(context.Context) ([]report.Row, error)
}

// all are the tables of a run in their order.
func (b *bench) all() []table {
	registry, index, identity, both := []string{"registry"}, []string{"index"}, []string{"identity"}, []string{"transfer"}
	t := &transfer.Bench{
		Bin: b.bin, Tools: b.tools, Dir: b.dir, Size: b.size, Rounds: b.rounds, Full: b.full, Client: b.client,
		Model: b.madeModel,
	}
	l := &gpuload.Bench{
		Bin: b.bin, Tools: b.tools, Dir: b.dir, Size: b.size, Rounds: b.rounds, Full: b.full, Model: b.madeModel,
	}
	loading := []string{"gpuload"}
	if b.versitygw != "" {
		return []table{{"s3", registry, own(b.s3)}}
	}
	return []table{
		{"identity", nil, own(b.identity)},
		{"lanes", identity, t.Identity},
		{"blobs", registry, own(b.blobCosts)},
		{"pushes", registry, own(b.largePushes)},
		{"manifests", registry, own(b.manifestRates)},
		{"farm", registry, own(b.farm)},
		{"index", nil, own(b.index)},
		{"find", index, own(b.find)},
		{"classify", index, own(b.classify)},
		{"push", both, t.Push},
		{"pull", both, t.Pull},
		{"repair", both, t.Repair},
		{"memory", []string{"registry", "transfer"}, own(b.memory)},
		{"tax", loading, l.Tax},
		{"onepass", loading, l.OnePass},
		{"loaders", loading, l.Peers},
		{"buffers", loading, l.Memory},
		{"attach", loading, l.Attach},
	}
}

// madeModel is model, made once.
func (b *bench) madeModel(ctx context.Context, shards int, size int64) (string, error) {
	dir := filepath.Join(b.dir, fmt.Sprintf("model-%d-%d", shards, size))
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	return b.model(ctx, shards, size)
}

// own are the rows of a table that this package makes.
func own(rows func(context.Context) ([]row, error)) func(context.Context) ([]report.Row, error) {
	return func(ctx context.Context) (all []report.Row, err error) {
		some, err := rows(ctx)
		for _, r := range some {
			all = append(all, r.report())
		}
		return all, err
	}
}

func (b *bench) tables(ctx context.Context, names []string) error {
	all := b.all()
	known := []string{}
	for _, t := range all {
		for _, name := range append([]string{t.name}, t.groups...) {
			if !slices.Contains(known, name) {
				known = append(known, name)
			}
		}
	}
	for _, name := range names {
		if !slices.Contains(known, name) {
			return fmt.Errorf("no table %q: want one of %s, or nothing for all", name, strings.Join(known, ", "))
		}
	}
	for _, t := range all {
		wanted := func(name string) bool { return slices.Contains(names, name) }
		if len(names) > 0 && !wanted(t.name) && !slices.ContainsFunc(t.groups, wanted) {
			continue
		}
		if err := b.table(ctx, t); err != nil {
			return fmt.Errorf("bench %s: %w", t.name, err)
		}
	}
	return nil
}

// table measures one table, prints it and keeps it.
func (b *bench) table(ctx context.Context, t table) (err error) {
	rig.Settle()
	r := report.Table{
		Name: t.name, Machine: report.ThisMachine(), Full: b.full, Size: b.size, Rounds: b.rounds,
		Before: report.Load(), Busy: report.Busy(time.Second),
	}
	fmt.Fprintf(b.out, "\n%s is being measured: load %s, others use %.0f %% of %d cores\n", r.Name, r.Before, 100*r.Busy,
		r.Machine.Cores)
	if r.Rows, err = t.rows(ctx); err != nil {
		return err
	}
	if len(r.Rows) == 0 {
		fmt.Fprintf(b.out, "\n%s: left out, there is no peer\n", t.name)
		return nil
	}
	r.After = report.Load()
	r = r.Judge()
	r.Print(b.out)
	if b.saved == "" {
		return nil
	}
	return r.Save(b.saved)
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

func (r row) report() report.Row {
	state := report.Missed
	switch {
	case r.goal == "":
		state = ""
	case r.met:
		state = report.Met
	}
	return report.Row{What: r.what, Value: r.value, Unit: r.unit, Goal: r.goal, State: state, Notes: r.notes}
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

// median returns the middle of vs, which it sorts, and its lowest and highest value as text.
func median(vs []float64) (float64, string) {
	slices.Sort(vs)
	return vs[len(vs)/2], fmt.Sprintf("%.2f to %.2f", vs[0], vs[len(vs)-1])
}
