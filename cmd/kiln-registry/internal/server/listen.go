package server

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/cmd/kiln-registry/internal/home"
	"github.com/kiln-registry/kiln-registry/internal/cli"
	"github.com/kiln-registry/kiln-registry/registry/metrics"
)

// checkAddr refuses what is no address to listen on.
func checkAddr(flag, addr string) error {
	hint := flag + " wants HOST:PORT, as " + cli.DefaultRegistry + "; port 0 takes any free one"
	_, port, err := net.SplitHostPort(addr)
	var bad *net.AddrError
	if errors.As(err, &bad) {
		return cli.Hint(cli.Usagef("%s %q: %s", flag, addr, bad.Err), hint)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || strconv.FormatUint(n, 10) != port {
		return cli.Hint(cli.Usagef("%s %q: %q is no port: want 0 to 65535", flag, addr, port), hint)
	}
	return nil
}

// listen opens the address, and says what to do where that fails.
func listen(flag, addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err == nil {
		return l, nil
	}
	code, hint := cli.CodeUsage, flag+" must name an address of this machine; 0.0.0.0:PORT is all of them"
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		hint = "another program listens there: stop it, or choose another port with " + flag
	case errors.Is(err, os.ErrPermission):
		code, hint = cli.CodeDisk, "this user may not listen there: choose a port from 1024 up with "+flag
	}
	return nil, cli.Hint(cli.Exit(code, fmt.Errorf("%s %s: %w", flag, addr, err)), hint)
}

// shown is the address as it was given, with the port that was taken.
func shown(given string, taken net.Addr) string {
	host, _, err := net.SplitHostPort(given)
	tcp, ok := taken.(*net.TCPAddr)
	if err != nil || host == "" || !ok {
		return taken.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(tcp.Port))
}

// isLoopback says whether a listen address can be reached from this machine only.
func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

// certificates reads what --tls-cert and --tls-key name; nil without them.
func (s *serving) certificates() ([]tls.Certificate, error) {
	if s.cert == "" {
		return nil, nil
	}
	chain, err := readPEM("--tls-cert", s.cert)
	if err != nil {
		return nil, err
	}
	key, err := readPEM("--tls-key", s.key)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(chain, key)
	if err != nil {
		return nil, cli.Hint(
			cli.Exit(cli.CodeBadInput, fmt.Errorf("--tls-cert %s, --tls-key %s: %w", s.cert, s.key, err)),
			"--tls-cert wants a PEM certificate chain, the server's own first, and --tls-key the PEM key of that one",
		)
	}
	return []tls.Certificate{pair}, nil
}

// readPEM keeps the code of the system's error: not found, or not allowed.
func readPEM(flag, path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, cli.Hint(fmt.Errorf("%s: %w", flag, err), flag+" must name a file that this user can read")
	}
	return b, nil
}

// metering is where the metrics are served.
type metering struct {
	here bool // beside the registry
	addr string
}

func (m *metering) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&m.here, "metrics", false, "serve /metrics beside the registry, to everybody who reaches it")
	f.StringVar(&m.addr, "metrics-addr", "", "address to serve /metrics on, apart from the registry, over plain HTTP")
}

func (m *metering) check() error {
	if m.addr == "" {
		return nil
	}
	return checkAddr("--metrics-addr", m.addr)
}

// open returns the metrics of a registry; nil: nobody is to read any.
func (m *metering) open(at home.Place, log *slog.Logger) *metrics.Metrics {
	if !m.here && m.addr == "" {
		return nil
	}
	kind := "folder"
	if at.Folder == "" {
		kind = "s3"
	}
	return metrics.New(cli.Version(), kind, log)
}

// listen opens the address of the metrics; nil: they have none of their own.
func (m *metering) listen() (net.Listener, error) {
	if m.addr == "" {
		return nil, nil
	}
	return listen("--metrics-addr", m.addr)
}

// serveMetrics serves the metrics on an address of their own; nil: they have none. The caller shuts the server down,
// and then calls wait.
func serveMetrics(l net.Listener, all http.Handler, log *slog.Logger) (server *http.Server, wait func()) {
	routes := http.NewServeMux()
	server = newServer(routes, log)
	if l == nil {
		return server, func() {}
	}
	routes.Handle("GET "+api.PathMetrics, all)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l) // ends when it is shut down
	}()
	return server, func() { <-done }
}
