// Package server is the command that serves a registry, and what the server does on its own meanwhile.
package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
	"github.com/kiln-registry/kiln-registry/registry/bounds"
)

const (
	headerTimeout  = 10 * time.Second
	keepAlive      = 2 * time.Minute // for the next request on a connection
	maxHeaderBytes = 64 << 10
	// checkLater is the size in bytes from which an index is read through while it is served: it is 20 ms of reading.
	checkLater = 32 << 20
)

// serving is what serve was asked for.
type serving struct {
	home.Flags
	logging
	addr         string
	tokenFile    string
	insecureOpen bool
	cert, key    string
	idle         time.Duration
	drain        time.Duration
	unready      time.Duration
	configured
	limits
	metering
	redirecting
	chores
}

// Command is serve.
func Command(stderr io.Writer) *cobra.Command {
	var s serving
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve a store over HTTP",
		Long: `Serve a store over HTTP.

With no flags: ` + cli.DefaultRegistry + `, data in ./` + home.DefaultStore + `, which is made on first start. Without
--token-file every caller may do everything, and only loopback addresses are taken.

What no flag says is looked for in the environment, --idle-timeout in KILN_IDLE_TIMEOUT, then in the YAML file of
--config, under idle-timeout.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.start(cmd, stderr) },
	}
	s.configured.bind(cmd)
	s.Flags.Bind(cmd)
	s.logging.bind(cmd)
	s.limits.bind(cmd)
	s.metering.bind(cmd)
	s.redirecting.bind(cmd)
	s.chores.bind(cmd)
	f := cmd.Flags()
	f.StringVar(&s.addr, "addr", cli.DefaultRegistry, "address to listen on")
	f.BoolVar(&s.Init, "init", false, "make --store a store first, if it is new or empty")
	f.StringVar(
		&s.tokenFile,
		"token-file",
		"",
		"YAML file of tokens and their rights; all that it does not allow is denied",
	)
	f.BoolVar(&s.insecureOpen, "insecure-open", false, "listen on a public address although everybody may do everything")
	f.StringVar(&s.cert, "tls-cert", "", "PEM file of the certificate chain; speaks HTTPS, with --tls-key")
	f.StringVar(&s.key, "tls-key", "", "PEM file of the certificate's key")
	f.DurationVar(&s.idle, "idle-timeout", time.Minute, "how long a request or an answer may make no progress")
	f.DurationVar(&s.drain, "drain-timeout", 30*time.Second, "how long running requests may take when the server stops")
	f.DurationVar(&s.unready, "drain-delay", 0, "how long to go on serving after /readyz began to fail, before it stops")
	return cmd
}

func (s *serving) run(ctx context.Context, stdout, stderr io.Writer) error {
	log, err := s.logging.open(stderr)
	if err != nil {
		return err
	}
	for _, line := range s.strays {
		log.Warn(line)
	}
	if err := s.check(); err != nil {
		return err
	}
	gate, err := s.gate(log)
	if err != nil {
		return err
	}
	certificates, err := s.certificates()
	if err != nil {
		return err
	}
	if err := s.Prepare(ctx); err != nil {
		return err
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(s.garbage())
	}
	o := home.Opening{
		Home: s.Home, CheckLater: checkLater, Metrics: s.metering.open(s.Place, log), MetricsHere: s.metering.here,
		Config: registry.Config{Access: gate, Log: log, IdleTimeout: s.idle, ReadOnly: s.readOnly, Immutable: s.immutable,
			Lease: s.lease, VerifyReads: s.verify, Redirect: s.redirecting.rules},
	}
	p, err := o.Open(ctx)
	if err != nil {
		return err
	}
	if s.readOnly {
		log.Info("read-only: pushes and deletes are refused, and nothing is removed")
	}
	err = s.serve(ctx, p, certificates, stdout, log)
	return errors.Join(err, p.Close())
}

// garbage is how much may grow beside what is live, in percent. On a disk so little is live that by default each page
// of a listing costs a collection, and half of its time. To a bucket the parts of uploads are nearly all that is live,
// and by default as much garbage may grow beside them.
func (s *serving) garbage() int {
	if s.Folder == "" {
		return 25
	}
	return 200
}

// check refuses flags that make no sense, and what would open the registry to everybody by mistake.
func (s *serving) check() error {
	if err := s.Flags.Check(); err != nil {
		return err
	}
	if err := cmp.Or(
		checkAddr("--addr", s.addr), s.limits.check(), s.metering.check(), s.chores.check(),
		cli.NotNegative("--drain-timeout", s.drain), cli.NotNegative("--drain-delay", s.unready),
	); err != nil {
		return err
	}
	if err := s.redirecting.check(s.Place, s.cert != ""); err != nil {
		return err
	}
	switch {
	case s.idle <= 0:
		return cli.Usagef("--idle-timeout %s: want more than 0", s.idle)
	case (s.cert == "") != (s.key == ""):
		return cli.Usagef("--tls-cert and --tls-key go together")
	case s.tokenFile == "" && !isLoopback(s.addr) && !s.insecureOpen:
		return cli.Hint(
			cli.Usagef("%s can be reached from other machines, and without --token-file everybody may do everything", s.addr),
			"kiln-registry token create makes a token file; --insecure-open if that is really meant",
		)
	}
	return nil
}

func (s *serving) gate(log *slog.Logger) (*access.Gate, error) {
	if s.tokenFile == "" {
		return access.Open(), nil
	}
	gate, err := access.Load(s.tokenFile, log)
	var path *fs.PathError
	switch {
	case err == nil:
		return gate, nil
	case errors.Is(err, fs.ErrNotExist):
		return nil, cli.Hint(
			cli.Exit(cli.CodeNotFound, err),
			fmt.Sprintf("kiln-registry token create NAME --token-file %s --repo 'team/**' makes it", s.tokenFile),
		)
	case errors.As(err, &path):
		return nil, cli.Hint(err, "the user that runs the registry must be able to read the file of --token-file")
	}
	return nil, cli.Exit(cli.CodeBadInput, err)
}

func (s *serving) serve(
	ctx context.Context, p *home.Parts, certificates []tls.Certificate, stdout io.Writer, log *slog.Logger,
) error {
	l, err := listen("--addr", s.addr)
	if err != nil {
		return err
	}
	toMetrics, err := s.metering.listen()
	if err != nil {
		return errors.Join(err, l.Close())
	}
	var requests inFlight
	server := newServer(requests.count(p.Registry), log)
	server.TLSConfig.Certificates = certificates
	admin, closeAdmin := listenAdmin(p, requests.count(p.Registry.Admin()), log)
	defer closeAdmin()
	defer requests.wait()
	failed := make(chan error, 1)
	go func() { failed <- s.accept(server, l) }()
	meter, closeMeter := serveMetrics(toMetrics, requests.count(p.Metrics), log)
	defer closeMeter()
	s.announce(stdout, l, toMetrics)

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var done sync.WaitGroup
	done.Go(func() {
		if err := p.Registry.Replay(ctx); err != nil && ctx.Err() == nil {
			cancel(p.NotReplayed(err))
			return
		}
		s.chores.run(ctx, p, log)
	})
	done.Go(func() {
		if err := p.Checked(ctx); err != nil && ctx.Err() == nil {
			cancel(p.NotReplayed(err))
		}
	})
	select {
	case err = <-failed:
		cancel(err)
	case <-p.Lost():
		err = cli.Hint(
			cli.Exit(cli.CodeTryAgain, fmt.Errorf("%s: %w: another process took it", p.Place, blobstore.ErrInUse)),
			"this one was not heard of for half a minute; see which registry is to serve this store",
		)
		cancel(err)
	case <-ctx.Done():
		if err = context.Cause(ctx); errors.Is(err, context.Canceled) {
			err = nil
		}
	}
	done.Wait()
	return errors.Join(err, s.stop(p, log, server, admin, meter))
}

// announce says where the server can be reached.
func (s *serving) announce(stdout io.Writer, l, toMetrics net.Listener) {
	fmt.Fprintf(stdout, "listening on %s://%s\n", s.scheme(), shown(s.addr, l.Addr()))
	if toMetrics != nil {
		fmt.Fprintf(stdout, "metrics on http://%s%s\n", shown(s.metering.addr, toMetrics.Addr()), api.PathMetrics)
	}
}

// inFlight counts requests, so that the store is not closed under one. It passes the ResponseWriter on as it is.
type inFlight struct{ n sync.WaitGroup }

func (f *inFlight) count(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.n.Add(1)
		defer f.n.Done()
		h.ServeHTTP(w, r)
	})
}

func (f *inFlight) wait() { f.n.Wait() }

func (s *serving) scheme() string {
	if s.cert != "" {
		return "https"
	}
	return "http"
}

func (s *serving) accept(server *http.Server, l net.Listener) error {
	if s.cert != "" {
		return server.ServeTLS(l, "", "") // the certificates are in its configuration
	}
	return server.Serve(l)
}

// newServer makes the HTTP server: version 1.1 only, as one stream of large bodies is what it is for; no deadline on a
// request, as the registry sets its own with each piece.
func newServer(h http.Handler, log *slog.Logger) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return &http.Server{
		Handler:           h,
		ConnContext:       bounds.WithConn,
		Protocols:         protocols,
		TLSConfig:         &tls.Config{MinVersion: tls.VersionTLS12},
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       keepAlive,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// stop lets readiness fail first, then takes no more connections, and gives running requests until the deadline.
func (s *serving) stop(p *home.Parts, log *slog.Logger, servers ...*http.Server) error {
	p.Registry.Stop()
	log.Info("stopping", "drain", s.drain)
	time.Sleep(s.unready)
	ctx, cancel := context.WithTimeout(context.Background(), s.drain)
	defer cancel()
	for _, server := range servers {
		if err := server.Shutdown(ctx); err != nil {
			log.Warn("requests cut off at the deadline")
			if err := server.Close(); err != nil {
				return err
			}
		}
	}
	return nil
}

// listenAdmin serves the administration socket in the state folder. A registry without one is whole all the same.
func listenAdmin(p *home.Parts, h http.Handler, log *slog.Logger) (*http.Server, func()) {
	server := newServer(h, log)
	path := p.File(home.SocketFile)
	_ = os.Remove(path) // left by a process that was killed: the lock of the store is ours
	old := syscall.Umask(0o177)
	l, err := net.Listen("unix", path)
	syscall.Umask(old)
	if err != nil {
		log.Warn("no administration socket: export and reindex need this server to be stopped", "error", err)
		return server, func() {}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l) // ends when it is shut down
	}()
	return server, func() { <-done }
}
