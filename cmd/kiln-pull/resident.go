package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/caching"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/gpuload/resident/metrics"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/internal/cli/progress"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
	"github.com/kiln-registry/kiln-registry/internal/sdnotify"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const (
	defaultResident = "127.0.0.1:8420" // where Kiln's own server listens
	phaseLoad       = "load"
	maxConfig       = 16 << 20 // bytes of a config.json that is read
)

type residentFlags struct {
	cli.Flags
	registry, repo, dir, expect string
	listen, device, tokens      string
	cache                       string // a folder, for what is pulled; empty: none
	socket                      string // where others attach; empty: named by the aggregate; socketOff: nowhere
	synthetic, debug            bool
	insecureOpen, direct        bool
	requireGPU, verifyDevice    bool
	drain                       time.Duration
	maxBuffer                   int64
}

func residentCommand() *cobra.Command {
	var f residentFlags
	cmd := &cobra.Command{
		Use:   "resident DIR|REF|AGGREGATE",
		Short: "Hold a model in memory, every byte checked, and answer /health",
		Long: "Hold a model in memory, every byte checked, and answer /health.\n\n" +
			"The shards are read once: each byte is hashed and loaded in the same pass. Until all of them match, /health and\n" +
			"/readyz answer 503. A folder that was pulled must be what its record says; any other folder is what it is, or\n" +
			"what --expect says. A REF or an AGGREGATE is pulled first. A signal ends it, after running requests.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.synthetic != (len(args) == 0) {
				return cli.Usagef("want either a DIR, REF or AGGREGATE, or --synthetic for no weights at all")
			}
			if err := f.check(strings.Join(args, "")); err != nil {
				return err
			}
			return explainLoad(f.run(cmd.Context(), strings.Join(args, ""), cmd.OutOrStdout(), cmd.ErrOrStderr()))
		},
	}
	f.bind(cmd)
	return cmd
}

// check refuses values that mean nothing, and --dir and --repo where nothing is pulled.
func (f *residentFlags) check(arg string) error {
	pulls := arg != "" && !isDir(arg)
	switch {
	case f.maxBuffer < 0:
		return cli.Usagef("--max-buffer %d: want a number of bytes, or 0 for the default", f.maxBuffer)
	case f.drain < 0:
		return cli.Usagef("--drain-timeout %s: want 0s or more", f.drain)
	case f.dir != "" && !pulls:
		return cli.Usagef("--dir is where a REF or AGGREGATE is pulled to; %q is held where it is", arg)
	case f.repo != "" && !pulls:
		return cli.Usagef("--repo goes with an AGGREGATE; nothing is pulled here")
	}
	kind, _, err := f.on()
	if err == nil && kind == hostmem.Backend && f.requireGPU {
		return cli.Usagef("--require-gpu: --device host is none")
	}
	return err
}

// bind adds the flags. --token-file means here what it means to kiln-registry serve, as this is a server; the token for
// the registry has a flag of its own.
func (f *residentFlags) bind(cmd *cobra.Command) {
	p := cmd.Flags()
	p.StringVar(&f.listen, "listen", defaultResident, "address to answer on")
	p.StringVar(&f.socket, "socket", "",
		"unix socket on which others attach, or off (default: named by the aggregate, in "+attach.Folder()+")")
	p.StringVar(&f.device, "device", "auto", "where the weights go: host, cuda:N, or auto")
	p.BoolVar(&f.requireGPU, "require-gpu", false, "fail where --device auto finds no GPU")
	p.BoolVar(&f.verifyDevice, "verify-device", false, "read every byte back before it is published, and hash it again")
	p.BoolVar(&f.synthetic, "synthetic", false, "hold no weights; /health says so")
	p.BoolVar(&f.debug, "debug-model-state", false, "answer "+resident.PathModelState+" (also: KILN_DEBUG_ENDPOINTS=1)")
	p.StringVar(&f.tokens, "token-file", "",
		"YAML file of tokens; one that may pull is asked for at "+resident.PathModelState)
	p.BoolVar(&f.insecureOpen, "insecure-open", false, "listen on a public address although everybody may ask everything")
	p.DurationVar(&f.drain, "drain-timeout", 10*time.Second, "how long leases and requests may last when it stops")
	p.StringVar(&f.expect, "expect", "", "the AGGREGATE that the weights must be")
	p.StringVar(&f.dir, "dir", "", "folder that a REF or AGGREGATE is pulled to (default: in the user's cache)")
	caching.Bind(cmd, &f.cache)
	p.StringVar(&f.registry, "registry", cli.Registry(), "where an AGGREGATE is asked for")
	p.StringVar(&f.repo, "repo", "", "the repository from which an AGGREGATE is pulled")
	p.StringVar(&f.TokenFile, "registry-token-file", "",
		"file that holds the bearer token for the registry (else $KILN_TOKEN, else the Docker config)")
	p.BoolVar(&f.PlainHTTP, "plain-http", false, "speak plain HTTP also to registries on other machines")
	p.StringVar(&f.CAFile, "ca-file", "", "PEM certificates to trust besides those of the system")
	p.BoolVar(&f.direct, "direct", false, "read the shards past the page cache")
	p.Int64Var(&f.maxBuffer, "max-buffer", 0, "bytes of buffers while loading, at most (default 192 MiB)")
	p.BoolVar(&f.JSON, "json", false, "print JSON on stdout")
	p.BoolVarP(&f.Quiet, "quiet", "q", false, "no progress on stderr")
}

// explainLoad gives the errors of a load their exit codes and hints.
func explainLoad(err error) error {
	switch {
	case errors.Is(err, gpuload.ErrMismatch):
		return cli.Hint(cli.Exit(cli.CodeNo, err),
			"kiln-pull verify says which files differ; pulling again repairs a pulled folder")
	case errors.Is(err, gpuload.ErrChanged), errors.Is(err, folder.ErrChanged):
		return cli.Hint(cli.Exit(cli.CodeBadInput, err), "let whatever writes to the folder finish")
	case errors.Is(err, transfer.ErrOccupied):
		return cli.Hint(err, "name another --dir, or make it what it should be with kiln-pull pull, which has --replace and --repair")
	case errors.Is(err, gpuload.ErrMemory):
		return cli.Hint(cli.Exit(cli.CodeDevice, err),
			"the weights are held whole; free some memory, or take a machine with more")
	case errors.Is(err, gpuload.ErrDevice):
		return cli.Exit(cli.CodeDevice, err)
	case errors.Is(err, localsock.ErrTaken):
		return cli.Hint(cli.Exit(cli.CodeUsage, err),
			"attach to what is held there (kiln-pull attach), end it (kiln-pull release), or name another --socket")
	case errors.Is(err, localsock.ErrFolder), errors.Is(err, localsock.ErrPath):
		return cli.Hint(cli.Exit(cli.CodeUsage, err),
			"--socket names one in a folder of mode 0700, which is made if it is missing; --socket off: nobody attaches")
	case errors.Is(err, resident.ErrPublic):
		return cli.Hint(cli.Exit(cli.CodeUsage, err),
			"--token-file says who may ask (kiln-registry token create makes one); --insecure-open if everybody may")
	}
	return err
}

// on parses --device: host, auto, or cuda with the index of the device.
func (f *residentFlags) on() (kind string, index int, err error) {
	kind, number, numbered := strings.Cut(f.device, ":")
	switch {
	case !numbered && (kind == hostmem.Backend || kind == "auto" || kind == cuda.Backend):
		return kind, 0, nil
	case kind == cuda.Backend:
		if index, err = strconv.Atoi(number); err == nil && index >= 0 {
			return kind, index, nil
		}
	}
	return "", 0, cli.Usagef("--device %q: want host, cuda:N, or auto", f.device)
}

// target opens the device and says which it is.
func (f *residentFlags) target(ctx context.Context) (t gpuload.Target, backend, name string, err error) {
	kind, index, err := f.on()
	if err != nil {
		return nil, "", "", err
	}
	if kind == hostmem.Backend {
		return new(hostmem.Target), hostmem.Backend, "host memory", nil
	}
	gpu, err := cuda.Open(index)
	switch {
	case err == nil:
		devices, err := gpu.Devices(ctx)
		if err != nil {
			return nil, "", "", cli.Exit(cli.CodeDevice, errors.Join(err, gpu.Free()))
		}
		name = devices[0].Name
		if kind == "auto" {
			name += " (auto: the first GPU)"
		}
		return gpu, cuda.Backend, name, nil
	case kind == "auto" && !f.requireGPU:
		return new(hostmem.Target), hostmem.Backend, fmt.Sprintf("host memory (auto: %v)", err), nil
	}
	err = cli.Exit(cli.CodeDevice, fmt.Errorf("--device %s: %w", f.device, err))
	return nil, "", "", cli.Hint(err, "--device host holds the weights in the memory of the host")
}

func (f *residentFlags) run(ctx context.Context, arg string, stdout, stderr io.Writer) error {
	var want identity.Aggregate
	var err error
	if f.expect != "" {
		if want, err = identity.ParseAggregate(f.expect); err != nil {
			return cli.Usagef("--expect: %w", err)
		}
		if want.IsZero() {
			return cli.Usagef("--expect: %s stands for no base", want)
		}
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	var gate *access.Gate
	if f.tokens != "" {
		if gate, err = access.Load(f.tokens, log); err != nil {
			return cli.Exit(cli.CodeBadInput, err)
		}
	}
	l, err := resident.Listen(ctx, f.listen, gate != nil || f.insecureOpen)
	if err != nil {
		return cli.Exit(cli.CodeUsage, err)
	}
	s := &resident.Server{
		Version: cli.Version(), Backend: "synthetic", Model: f.name(arg), Gate: gate, Log: log, Drain: f.drain,
		Debug: f.debug || resident.DebugEnabled(os.Getenv("KILN_DEBUG_ENDPOINTS")), Socket: f.attachable(),
		Notify: func(state string) {
			if err := sdnotify.Send(state); err != nil {
				cli.Warn(stderr, "%v", err)
			}
		},
	}
	s.Metrics = metrics.Handler(s)
	show := progress.New(f.Flags, stdout, stderr)
	shown := sync.OnceFunc(show.Close)
	defer shown()
	h := &holding{residentFlags: f, arg: arg, want: want, show: show, warn: stderr, remove: func() error { return nil }}
	load := h.load
	if f.synthetic {
		load = func(context.Context) (held resident.Held, err error) { return held, nil }
	} else {
		var name string
		if h.target, s.Backend, name, err = f.target(ctx); err != nil {
			return errors.Join(err, l.Close())
		}
		show.Note("device: " + name)
	}
	err = s.Run(ctx, l, load, func(held resident.Held) error {
		shown()
		return f.announce(stdout, stderr, "http://"+l.Addr().String(), s, held)
	})
	if h.target != nil {
		err = errors.Join(err, h.target.Free()) // a load that was not begun frees nothing
	}
	return errors.Join(err, h.remove())
}

// socketOff is the value of --socket for a model that nobody attaches to.
const socketOff = "off"

// attachable is the socket for the server: a folder if the aggregate is to name it.
func (f *residentFlags) attachable() string {
	switch {
	case f.synthetic || f.socket == socketOff:
		return ""
	case f.socket == "":
		return attach.Folder() + "/"
	}
	return f.socket
}

// name is what people call the model.
func (f *residentFlags) name(arg string) string {
	switch info, err := os.Stat(arg); {
	case f.synthetic:
		return "synthetic"
	case err == nil && info.IsDir():
		if abs, err := filepath.Abs(arg); err == nil {
			return filepath.Base(abs)
		}
	}
	return arg
}

// announcement is the last line of resident --json.
type announcement struct {
	Event     string             `json:"event"` // resident
	URL       string             `json:"url"`
	Socket    string             `json:"socket,omitempty"` // absent: nobody attaches
	Backend   string             `json:"backend"`
	Model     string             `json:"model"`
	Path      string             `json:"path,omitempty"`
	Aggregate identity.Aggregate `json:"aggregate_sha256,omitzero"` // absent: synthetic
	Size      uint64             `json:"size_bytes"`
	Shards    int                `json:"shards"`
	Tensors   int                `json:"tensors"`
	Load      *loadJSON          `json:"load,omitempty"`
}

// loadJSON is how the load went; busy times are summed over the lanes.
type loadJSON struct {
	Seconds float64 `json:"seconds"`
	Read    float64 `json:"read_busy_seconds"`
	Hash    float64 `json:"hash_busy_seconds"`
	Copy    float64 `json:"copy_busy_seconds"`
	Lanes   int     `json:"lanes"`
	Buffer  int64   `json:"buffer_bytes"`
}

// announce says on stdout what is held and where, and on stderr what the load was limited by.
func (f *residentFlags) announce(stdout, stderr io.Writer, url string, s *resident.Server, held resident.Held) error {
	out := announcement{Event: "resident", URL: url, Backend: s.Backend, Model: s.Model, Path: held.Path, Socket: held.Socket}
	text := "resident: no weights (synthetic)"
	if w := held.Weights; w != nil {
		m, st := w.Manifest(), w.Stats()
		out.Aggregate, out.Size, out.Shards, out.Tensors = m.Aggregate, m.TotalSize, len(m.Shards), len(w.Tensors())
		out.Load = &loadJSON{
			st.Elapsed.Seconds(), st.Read.Seconds(), st.Hash.Seconds(), st.Copy.Seconds(), st.Lanes, st.Buffer,
		}
		text = fmt.Sprintf("resident: %s, %s", m.Aggregate, cli.Bytes(int64(m.TotalSize)))
		if !f.Quiet && !f.JSON {
			fmt.Fprintf(stderr, "loaded %s\n", st)
		}
	}
	if f.JSON {
		return json.NewEncoder(stdout).Encode(out)
	}
	if held.Socket != "" {
		url += " and " + held.Socket
	}
	_, err := fmt.Fprintf(stdout, "%s, on %s\n", text, url)
	return err
}

// holding is one model on its way into memory.
type holding struct {
	*residentFlags
	arg    string
	want   identity.Aggregate // zero: whatever the folder holds
	target gpuload.Target
	show   *progress.Show
	warn   io.Writer
	remove func() error // of a folder that nobody named; called when the weights are freed
}

// load finds the folder, or makes it, and holds its weights.
func (h *holding) load(ctx context.Context) (held resident.Held, err error) {
	dir := h.arg
	if !isDir(dir) {
		if dir, err = h.pull(ctx); err != nil {
			return held, err
		}
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return held, err
	}
	in, err := folder.Open(dir, folder.Options{})
	if err != nil {
		return held, err
	}
	for _, w := range in.Warnings {
		cli.Warn(h.warn, "%s (%s)", w.Message, w.Code)
	}
	want, err := h.wanted(in)
	if err != nil {
		return held, err
	}
	weights, err := h.fill(ctx, in, want)
	if err != nil {
		return held, err
	}
	return resident.Held{Weights: weights, Path: in.Dir, Config: config(in), At: time.Now()}, nil
}

// isDir says whether an argument is meant as a folder: it is one, or it is written as a path.
func isDir(arg string) bool {
	if info, err := os.Stat(arg); err == nil && info.IsDir() {
		return true
	}
	return strings.HasPrefix(arg, "/") || strings.HasPrefix(arg, "./") || strings.HasPrefix(arg, "../")
}

// pull makes the folder of a reference or an aggregate.
func (h *holding) pull(ctx context.Context) (string, error) {
	s, err := parseSource(h.arg, h.registry, h.repo)
	if err != nil {
		return "", cli.Hint(err, "a folder that is not there is written as a path: ./NAME")
	}
	c, err := h.Client(s.host, h.show.Note)
	if err != nil {
		return "", err
	}
	defer c.Close()
	plan, err := s.resolve(ctx, c, h.show.Note)
	if err != nil {
		listPackagings(h.warn, err)
		return "", err
	}
	if len(plan.Base.Shards) == 0 {
		return "", cli.Exit(cli.CodeBadInput, fmt.Errorf("%s is no base that can be held: %w", plan.Reference(), plan.NoBase))
	}
	dir, err := h.place(plan)
	if err != nil {
		return "", err
	}
	h.want = cmp.Or(h.want, s.aggregate, plan.Base.Aggregate)
	h.show.Note("pulling " + plan.Reference())
	kept, err := caching.Open(h.cache, h.show.Note)
	if err != nil {
		return "", err
	}
	done, err := transfer.Pull(ctx, c, plan, dir, transfer.PullOptions{Cache: kept, Watch: h.show.Watch})
	return done.Target, explainPlace(err)
}

// place is the folder to pull to: --dir, else one in the cache of the user, else one that goes with this process.
func (h *holding) place(plan transfer.Plan) (string, error) {
	if h.dir != "" {
		return h.dir, nil
	}
	name := plan.Manifest.Hex()
	cache, err := os.UserCacheDir()
	if err == nil {
		dir := filepath.Join(cache, "kiln", "resident")
		return filepath.Join(dir, name), os.MkdirAll(dir, 0o700)
	}
	dir, err := os.MkdirTemp("", "kiln-resident-")
	h.remove = func() error { return os.RemoveAll(dir) }
	return filepath.Join(dir, name), err
}

// wanted says what the shards of a folder must be: what the record of the pull says, if it was pulled.
func (h *holding) wanted(in *folder.Folder) (gpuload.Want, error) {
	want := gpuload.Want{Aggregate: h.want}
	target, err := staging.Target(in.Dir)
	if err != nil {
		return want, nil // no record can be beside it
	}
	known, err := staging.Known(target)
	if err != nil || known.Complete == nil {
		return want, err
	}
	want.Aggregate = cmp.Or(want.Aggregate, known.Complete.Aggregate)
	if m, ok := recorded(*known.Complete, in.Shards); ok {
		want.Manifest = &m
	}
	return want, nil
}

// recorded returns the manifest of the shards as a record has them, false if it lacks one.
func recorded(r staging.Record, shards []folder.File) (identity.Manifest, bool) {
	var found []identity.Shard
	for _, s := range shards {
		for _, x := range r.Files {
			if x.Name == s.Name {
				found = append(found, identity.Shard{Filename: x.Name, Size: uint64(x.Size), Digest: x.Digest})
			}
		}
	}
	m, err := identity.New(found)
	return m, err == nil && len(found) == len(shards)
}

// fill reads, checks and loads the shards in one pass.
func (h *holding) fill(ctx context.Context, in *folder.Folder, want gpuload.Want) (_ *gpuload.Resident, err error) {
	src, err := gpuload.OpenDir(in.Dir, h.direct, h.show.Note)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	sizes := map[string]int64{}
	var names []string
	for _, s := range in.Shards {
		names, sizes[s.Name] = append(names, s.Name), s.Size
		h.show.Watch(transfer.Event{Step: transfer.Planned, Phase: phaseLoad, File: s.Name, Total: s.Size})
	}
	plan, err := gpuload.NewPlan(ctx, src, names, want)
	if err != nil {
		return nil, err
	}
	chunk := int64(hostmem.Chunk)
	if _, host := h.target.(*hostmem.Target); h.direct || !host {
		chunk = gpuload.DefaultChunk // one read for each buffer, and nothing reads ahead; few calls of the device
	}
	return gpuload.Load(ctx, plan, src, h.target, gpuload.Options{
		ChunkBytes:   chunk,
		MaxBuffer:    h.maxBuffer,
		VerifyDevice: h.verifyDevice,
		Notify:       h.show.Note,
		Progress: func(shard string, done int64) {
			h.show.Watch(transfer.Event{Step: transfer.Moved, Phase: phaseLoad, File: shard, Bytes: done, Total: sizes[shard]})
		},
	})
}

// config reads the folder's config.json, if it is a regular file.
func config(in *folder.Folder) resident.Config {
	for _, o := range in.Others {
		if o.Name != "config.json" {
			continue
		}
		f, err := os.Open(filepath.Join(in.Dir, o.Name))
		if err != nil {
			break
		}
		defer f.Close()
		if b, err := io.ReadAll(io.LimitReader(f, maxConfig)); err == nil {
			return resident.ParseConfig(b)
		}
	}
	return resident.Config{}
}
