// Package testpg runs PostgreSQL for tests: servers of the test's own, on loopback ports, in folders that go with it.
// Only tests import it.
package testpg

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/internal/testenv"
	"github.com/kiln-registry/kiln-registry/internal/testproc"
)

// password is that of the user kiln, a superuser.
var password = rand.Text()

// Server is one PostgreSQL. It listens on a port of 127.0.0.1 and takes the user kiln with a password.
type Server struct {
	cluster *cluster
	data    string // folder
	port    string
	process *testproc.Process
}

// shared is the server that the tests of one process have in common.
var shared struct {
	sync.Mutex
	inMain bool
	server *Server
	err    error
}

// Shared returns the server that all tests of the process share. It does not sync its disk. The first call starts it,
// Main ends it.
func Shared(t testing.TB) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	switch {
	case !shared.inMain:
		t.Fatal("testpg.Shared: nothing would end the server (hint: func TestMain(m *testing.M) { testpg.Main(m) })")
	case shared.server == nil && shared.err == nil:
		shared.server, shared.err = single(testenv.Root(t))
	}
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server
}

// Main is the whole TestMain of a package that uses Shared.
func Main(m *testing.M) {
	shared.Lock()
	shared.inMain = true
	shared.Unlock()
	code := m.Run()
	if s := shared.server; s != nil {
		s.stop()
		_ = os.RemoveAll(s.cluster.dir)
	}
	os.Exit(code)
}

func single(root string) (*Server, error) {
	c, err := newCluster(root)
	if err != nil {
		return nil, err
	}
	s, err := c.init("data")
	if err == nil {
		err = s.start("-cfsync=off", "-cfull_page_writes=off")
	}
	return s, err
}

// init makes a server that has not started.
func (c *cluster) init(name string) (*Server, error) {
	secret := filepath.Join(c.dir, "password")
	if err := os.WriteFile(secret, []byte(password), 0o644); err != nil {
		return nil, err
	}
	s := &Server{cluster: c, data: filepath.Join(c.dir, name)}
	return s, c.run("initdb", "--username=kiln", "--pwfile="+secret, "--auth=scram-sha-256", "--encoding=UTF8",
		"--locale=C", "--no-sync", "-D", s.data)
}

// start starts the server with settings on a free port, and waits until it answers. It tries again where somebody else
// takes the port first.
func (s *Server) start(settings ...string) (err error) {
	for range 5 {
		if err = s.try(settings); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%w; it said:\n%s", err, s.said())
}

func (s *Server) try(settings []string) error {
	ports, err := testproc.FreePorts(1)
	if err != nil {
		return err
	}
	s.port = ports[0]
	log, err := os.OpenFile(s.data+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := s.cluster.command("postgres", append([]string{"-D", s.data, "-p", s.port, "-clisten_addresses=127.0.0.1",
		"-cunix_socket_directories=", "-cmax_connections=200", "-cshared_buffers=64MB", "-cwal_keep_size=512MB",
		"-clog_line_prefix=%m [%p] "}, settings...)...)
	cmd.Stdout, cmd.Stderr = log, log
	if s.process, err = testproc.Start(cmd, syscall.SIGQUIT); err != nil {
		return err
	}
	return s.answers()
}

// stop ends the server.
func (s *Server) stop() { s.process.Stop(syscall.SIGQUIT, 10*time.Second) }

// answers waits until the server takes queries.
func (s *Server) answers() error {
	deadline := time.After(time.Minute)
	for tick := time.Tick(20 * time.Millisecond); ; {
		_, err := s.ask("select 1")
		if err == nil {
			return nil
		}
		select {
		case <-tick:
		case <-s.process.Done:
			return errors.New("PostgreSQL ended")
		case <-deadline:
			kill(s.process)
			return fmt.Errorf("PostgreSQL does not answer: %w", err)
		}
	}
}

// said is the end of the server's log.
func (s *Server) said() string {
	b, _ := os.ReadFile(s.data + ".log")
	return string(b[max(0, len(b)-4000):])
}

// Port returns where the server listens on 127.0.0.1.
func (s *Server) Port() string { return s.port }

// URL returns that of a database.
func (s *Server) URL(database string) string { return urlOf(database, s) }

func urlOf(database string, servers ...*Server) string {
	var hosts []string
	for _, s := range servers {
		hosts = append(hosts, "127.0.0.1:"+s.port)
	}
	return fmt.Sprintf("postgres://kiln:%s@%s/%s?sslmode=disable", password, strings.Join(hosts, ","), database)
}

// Password returns that of the user kiln.
func Password() string { return password }

// Database makes an empty database, which goes with the test, and returns its URL.
func (s *Server) Database(t testing.TB) string {
	t.Helper()
	name := "test_" + strings.ToLower(rand.Text()[:16])
	if _, err := s.ask("create database " + name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := s.ask("drop database " + name + " with (force)"); err != nil {
			t.Error(err)
		}
	})
	return s.URL(name)
}

// Exec runs a statement in a database by its URL, and returns the first column of the first row as text.
func Exec(t testing.TB, url, sql string) string {
	t.Helper()
	text, err := ask(url, sql)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func (s *Server) ask(sql string) (string, error) { return ask(s.URL("postgres"), sql) }

func ask(url, sql string) (text string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer c.Close(ctx)
	all, err := c.PgConn().Exec(ctx, sql).ReadAll()
	if err == nil && len(all) > 0 {
		if rows := all[len(all)-1].Rows; len(rows) > 0 && len(rows[0]) > 0 {
			text = string(rows[0][0])
		}
	}
	return text, err
}

// Kill kills the server and its children with SIGKILL, and forgets the shared memory that they leave.
func (s *Server) Kill() {
	b, _ := os.ReadFile(filepath.Join(s.data, "postmaster.pid"))
	kill(s.process)
	if lines := bytes.Split(b, []byte("\n")); len(lines) > 6 { // the seventh: key and id of the segment
		if f := bytes.Fields(lines[6]); len(f) == 2 {
			id, _ := strconv.Atoi(string(f[1]))
			_, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
		}
	}
}
