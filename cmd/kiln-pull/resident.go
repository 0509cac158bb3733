package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/adapting"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/caching"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/device"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-pull/internal/holding"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/adapters"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
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
)

const defaultResident = "127.0.0.1:8420" // where Kiln's own server listens

type residentFlags struct {
	cli.Flags
	registry, repo, dir, expect string
	listen, tokens              string
	on                          device.Flags
	adapters                    adapting.Flags
	cache                       string // a folder, for what is pulled; empty: none
	socket                      string // where others attach; empty: named by the aggregate; socketOff: nowhere
	synthetic, debug            bool
	insecureOpen, direct        bool
	verifyDevice                bool
	drain                       time.Duration
	maxBuffer, maxPinned        cli.Size
}

func residentCommand() *cobra.Command {
	var f residentFlags
	cmd := &cobra.Command{
		Use:   "resident DIR|REF|AGGREGATE",
		Short: "Hold a model in memory, every byte checked, and answer /health",
		Long: "Hold a model in memory, every byte checked, and answer /health.\n\n" +
			"The shards are read once: each byte is hashed and loaded in the same pass. Until all of them match, /health and\n" +
			"/readyz answer 503. A folder that was pulled must be what its record says; any other folder is what it is, or\n" +
			"what --expect says. A REF or an AGGREGATE comes straight from the registry; with --dir it is also written there,\n" +
			"in the same pass, as the folder of a pull. A signal ends it, after running requests.",
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
	pulls := arg != "" && !holding.IsDir(arg)
	switch {
	case f.maxBuffer > 0 && f.maxPinned > 0:
		return cli.Usagef("--max-buffer and --max-pinned are the same: want one of them")
	case f.maxBuffer > 0 && f.maxBuffer < gpuload.MinBuffer, f.maxPinned > 0 && f.maxPinned < gpuload.MinBuffer:
		return cli.Usagef("--max-buffer or --max-pinned %d: too few bytes, want %d or more, or 0 for the default",
			max(f.maxBuffer, f.maxPinned), gpuload.MinBuffer)
	case strings.HasPrefix(f.socket, "@"):
		return cli.Usagef("--socket %s: want the path of a file; anybody can connect to an abstract socket", f.socket)
	case f.synthetic && f.adapters.Any():
		return cli.Usagef("--adapter goes onto weights, and --synthetic holds none")
	case f.drain < 0:
		return cli.Usagef("--drain-timeout %s: want 0s or more", f.drain)
	case f.dir != "" && !pulls:
		return cli.Usagef("--dir is where a REF or AGGREGATE is pulled to; %q is held where it is", arg)
	case f.repo != "" && !pulls:
		return cli.Usagef("--repo goes with an AGGREGATE; nothing is pulled here")
	}
	_, err := f.on.Choice()
	return err
}

// bind adds the flags. --token-file means here what it means to kiln-registry serve, as this is a server; the token for
// the registry has a flag of its own.
func (f *residentFlags) bind(cmd *cobra.Command) {
	p := cmd.Flags()
	p.StringVar(&f.listen, "listen", defaultResident, "address to answer on")
	p.StringVar(&f.socket, "socket", "",
		"unix socket on which others attach, or off (default: named by the aggregate, in "+attach.Folder()+")")
	f.on.Bind(cmd)
	f.adapters.Bind(cmd)
	p.BoolVar(&f.verifyDevice, "verify-device", false, "read every byte back before it is published, and hash it again")
	p.BoolVar(&f.synthetic, "synthetic", false, "hold no weights; /health says so")
	p.BoolVar(&f.debug, "debug-model-state", false, "answer "+resident.PathModelState+" (also: KILN_DEBUG_ENDPOINTS=1)")
	p.StringVar(&f.tokens, "token-file", "",
		"YAML file of tokens; one that may pull is asked for at "+resident.PathModelState)
	p.BoolVar(&f.insecureOpen, "insecure-open", false, "listen on a public address although everybody may ask everything")
	p.DurationVar(&f.drain, "drain-timeout", 10*time.Second, "how long leases and requests may last when it stops")
	p.StringVar(&f.expect, "expect", "", "the AGGREGATE that the weights must be")
	p.StringVar(&f.dir, "dir", "", "folder that a REF or AGGREGATE is also pulled to (default: none)")
	caching.Bind(cmd, &f.cache)
	p.StringVar(&f.registry, "registry", cli.Registry(), "where an AGGREGATE is asked for")
	p.StringVar(&f.repo, "repo", "", "the repository from which an AGGREGATE is pulled")
	p.StringVar(&f.TokenFile, "registry-token-file", "",
		"file that holds the bearer token for the registry (else $KILN_TOKEN, else the Docker config)")
	p.BoolVar(&f.PlainHTTP, "plain-http", false, "speak plain HTTP also to registries on other machines")
	p.StringVar(&f.CAFile, "ca-file", "", "PEM certificates to trust besides those of the system")
	p.BoolVar(&f.direct, "direct", false, "read the shards past the page cache")
	p.Var(&f.maxBuffer, "max-buffer", "bytes of buffers while loading, at most, as 64MiB; 0: 192MiB")
	p.Var(&f.maxPinned, "max-pinned", "the same: the buffers are all that is pinned for a GPU")
	p.BoolVar(&f.JSON, "json", false, "print JSON on stdout")
	p.BoolVarP(&f.Quiet, "quiet", "q", false, "no progress on stderr")
}

// explainLoad gives the errors of a load their exit codes and hints.
func explainLoad(err error) error {
	err = adapting.Explain(explainPlace(err))
	var listens *net.OpError
	switch {
	case errors.Is(err, holding.ErrSent):
		return cli.Hint(cli.Exit(cli.CodeNo, err),
			"the registry, or what is between, changed the bytes: kiln-registry scrub finds them there, a push repairs them")
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
	case errors.Is(err, resident.ErrLost):
		return cli.Hint(cli.Exit(cli.CodeDevice, err),
			"only a new process can use that device again: have what runs this one start it anew when it fails")
	case errors.Is(err, gpuload.ErrDevice), errors.Is(err, gpuload.ErrHung), errors.As(err, new(*cuda.Error)):
		return cli.Exit(cli.CodeDevice, err)
	case errors.Is(err, resident.ErrLeased):
		return cli.Hint(cli.Exit(cli.CodeNo, err), "--drain-timeout gives those who are attached more time")
	case errors.Is(err, localsock.ErrTaken):
		return cli.Hint(cli.Exit(cli.CodeUsage, err),
			"attach to what is held there (kiln-pull attach), end it (kiln-pull release), or name another --socket")
	case errors.Is(err, localsock.ErrFolder), errors.Is(err, localsock.ErrPath):
		return cli.Hint(cli.Exit(cli.CodeUsage, err),
			"--socket names one in a folder of mode 0700, which is made if it is missing; --socket off: nobody attaches")
	case errors.As(err, &listens) && listens.Net == "unix":
		return cli.Hint(cli.Exit(cli.CodeUsage, err), "--socket names a file that can be made; --socket off: nobody attaches")
	case errors.Is(err, resident.ErrPublic):
		return cli.Hint(cli.Exit(cli.CodeUsage, err),
			"--token-file says who may ask (kiln-registry token create makes one); --insecure-open if everybody may")
	}
	return err
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
		if gate, err = access.Load(f.tokens, log); errors.Is(err, fs.ErrNotExist) {
			return cli.Exit(cli.CodeNotFound, err)
		} else if err != nil {
			return cli.Exit(cli.CodeBadInput, err)
		}
	}
	l, err := resident.Listen(ctx, f.listen, gate != nil || f.insecureOpen)
	if err != nil {
		return cli.Hint(cli.Exit(cli.CodeUsage, err), badListen(err))
	}
	s := &resident.Server{
		Version: cli.Version(), Backend: "synthetic", Model: f.name(arg), Gate: gate, Log: log, Drain: f.drain,
		Debug: f.debug || resident.DebugEnabled(os.Getenv("KILN_DEBUG_ENDPOINTS")), Socket: f.attachable(arg, want),
	}
	if err := underSystemd(s, stderr); err != nil {
		return errors.Join(err, l.Close())
	}
	s.Metrics = metrics.Handler(s)
	show := progress.New(f.Flags, stdout, stderr)
	shown := sync.OnceFunc(show.Close)
	defer shown()
	h, load := new(holding.Holding), synthetic
	if !f.synthetic {
		var name string
		on, err := f.on.Choice()
		if err == nil {
			h, s.Backend, name, err = f.holding(ctx, arg, want, on, show, stderr)
		}
		if err != nil {
			return errors.Join(err, l.Close())
		}
		load = f.onto(h.Load, on.Same(s.Backend), show)
		if s.Backend == cuda.Backend {
			s.Alive = func(ctx context.Context) error { _, err := h.Target.Devices(ctx); return err }
		}
		show.Note("device: " + name)
	}
	err = s.Run(ctx, l, load, func(held resident.Held) error {
		shown()
		return f.announce(stdout, stderr, "http://"+l.Addr().String(), s, held)
	})
	return errors.Join(err, h.Close())
}

// underSystemd has the server tell systemd how it stands, and in time that it is alive, as far as systemd asks for that.
func underSystemd(s *resident.Server, stderr io.Writer) error {
	s.Notify = func(state string) {
		if err := sdnotify.Send(state); err != nil {
			cli.Warn(stderr, "%v", err)
		}
	}
	within, err := sdnotify.Watchdog()
	if err != nil {
		return cli.Exit(cli.CodeUsage, err)
	}
	if s.Watchdog = within > 0; s.Watchdog {
		s.Beat = min(within/2, 10*time.Second)
	}
	return nil
}

// onto has load bring the adapters too, to where the base is.
func (f *residentFlags) onto(load func(context.Context) (resident.Held, error), target func() (gpuload.Target, error),
	show *progress.Show,
) func(context.Context) (resident.Held, error) {
	return f.adapters.Onto(load, adapters.Options{
		Target: target, Dial: dial(&f.Flags, show), Registry: f.registry,
		Load: gpuload.Options{MaxBuffer: int64(max(f.maxBuffer, f.maxPinned)), VerifyDevice: f.verifyDevice},
	}, show.Note)
}

// badListen says what can be done about an address that can't be listened on.
func badListen(err error) string {
	switch {
	case errors.Is(err, resident.ErrPublic):
		return "" // explainLoad has it
	case errors.Is(err, syscall.EADDRINUSE):
		return "another process has it: name another --listen"
	}
	return "--listen names an address of this machine and a port, such as " + defaultResident
}

// synthetic loads nothing.
func synthetic(context.Context) (held resident.Held, err error) { return held, nil }

// holding opens the device for what arg names, and says which it is.
func (f *residentFlags) holding(ctx context.Context, arg string, want identity.Aggregate, on device.Choice,
	show *progress.Show, stderr io.Writer,
) (h *holding.Holding, backend, name string, err error) {
	o := holding.Options{
		Dir: f.dir, Want: want, Cache: f.cache, Direct: f.direct, VerifyDevice: f.verifyDevice,
		MaxBuffer: int64(max(f.maxBuffer, f.maxPinned)),
		Note:      show.Note, Watch: show.Watch, Warn: func(line string) { cli.Warn(stderr, "%s", line) },
	}
	if holding.IsDir(arg) {
		o.Dir = arg
	} else {
		from, err := parseSource(arg, f.registry, f.repo)
		if err != nil {
			return nil, "", "", cli.Hint(err,
				"a folder that is not there is written as a path: ./NAME; a model of a hub is downloaded, or pushed here, first")
		}
		o.Want = cmp.Or(want, from.aggregate)
		o.Resolve = func(ctx context.Context) (*client.Client, transfer.Plan, error) {
			return f.resolve(ctx, from, show.Note, stderr)
		}
	}
	o.Placement = on.Placement()
	o.Target, backend, name, err = on.Open(ctx, o.Warn)
	return holding.New(o), backend, name, err
}

// resolve finds what is pulled. Where there is a choice it is listed on stderr.
func (f *residentFlags) resolve(ctx context.Context, from source, note func(string), stderr io.Writer) (
	*client.Client, transfer.Plan, error,
) {
	c, err := f.Client(from.host, note)
	if err != nil {
		return nil, transfer.Plan{}, err
	}
	plan, err := from.resolve(ctx, c, note)
	if err != nil {
		listPackagings(stderr, err)
		c.Close()
	}
	return c, plan, err
}

// socketOff is the value of --socket for a model that nobody attaches to.
const socketOff = "off"

// attachable is the socket for the server: a folder if what is read from it is to name it.
func (f *residentFlags) attachable(arg string, want identity.Aggregate) string {
	if want.IsZero() {
		want, _, _ = transfer.ParseAggregate(arg) // what is none is refused elsewhere
	}
	switch {
	case f.synthetic || f.socket == socketOff:
		return ""
	case f.socket == "" && want.IsZero():
		return attach.Folder() + "/"
	case f.socket == "":
		return filepath.Join(attach.Folder(), attach.SocketName(want))
	}
	path, err := filepath.Abs(f.socket)
	if err != nil {
		return f.socket
	}
	if strings.HasSuffix(f.socket, "/") {
		path += "/" // a folder
	}
	return path
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
	Disk    float64 `json:"disk_busy_seconds,omitempty"` // absent: nothing was written to a folder
	Lanes   int     `json:"lanes"`
	Buffer  int64   `json:"buffer_bytes"`
}

// announce says on stdout what is held and where, and on stderr what the load was limited by.
func (f *residentFlags) announce(stdout, stderr io.Writer, url string, s *resident.Server, held resident.Held) error {
	out := announcement{
		Event: "resident", URL: url, Socket: held.Socket, Backend: s.Backend, Model: s.Model, Path: held.Path,
	}
	text := "resident: no weights (synthetic)"
	if w := held.Weights; w != nil {
		m, st := w.Manifest(), w.Stats()
		out.Aggregate, out.Size, out.Shards, out.Tensors = m.Aggregate, m.TotalSize, len(m.Shards), len(w.Tensors())
		out.Load = &loadJSON{
			st.Elapsed.Seconds(), st.Read.Seconds(), st.Hash.Seconds(), st.Copy.Seconds(), st.Disk.Seconds(), st.Lanes,
			st.Buffer,
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
