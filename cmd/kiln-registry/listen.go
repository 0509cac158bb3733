package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"

	"github.com/kiln-registry/kiln-registry/internal/cli"
)

const addrHint = "--addr wants HOST:PORT, as " + cli.DefaultRegistry + "; port 0 takes any free one"

// checkAddr refuses what is no address to listen on.
func checkAddr(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	var bad *net.AddrError
	if errors.As(err, &bad) {
		return cli.Hint(cli.Usagef("--addr %q: %s", addr, bad.Err), addrHint)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || strconv.FormatUint(n, 10) != port {
		return cli.Hint(cli.Usagef("--addr %q: %q is no port: want 0 to 65535", addr, port), addrHint)
	}
	return nil
}

// listen opens the address, and says what to do where that fails.
func listen(addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err == nil {
		return l, nil
	}
	code, hint := cli.CodeUsage, "--addr must name an address of this machine; 0.0.0.0:PORT is all of them"
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		hint = "another program listens there: stop it, or choose another port with --addr"
	case errors.Is(err, os.ErrPermission):
		code, hint = cli.CodeDisk, "this user may not listen there: choose a port from 1024 up with --addr"
	}
	return nil, cli.Hint(cli.Exit(code, fmt.Errorf("--addr %s: %w", addr, err)), hint)
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
