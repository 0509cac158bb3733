package testpg

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/internal/testenv"
)

// Replicated is a primary with standbys, of which one has to have a write before it is acknowledged. They sync their
// disks.
type Replicated struct {
	Primary  *Server
	Standbys []*Server
	all      []*Server
}

// NewReplicated starts a primary and n standbys, which go with the test.
func NewReplicated(t testing.TB, n int) *Replicated {
	t.Helper()
	r, err := replicated(t, n)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func replicated(t testing.TB, n int) (*Replicated, error) {
	c, err := newCluster(testenv.Root(t))
	if err != nil {
		return nil, err
	}
	r := &Replicated{}
	t.Cleanup(func() {
		for _, s := range r.all {
			s.stop()
		}
		if err := os.RemoveAll(c.dir); err != nil {
			t.Error(err)
		}
	})
	if r.Primary, err = c.init("primary"); err != nil {
		return nil, err
	}
	if err := r.Primary.start(); err != nil {
		return nil, err
	}
	r.all = append(r.all, r.Primary)
	var names []string
	for i := range n {
		name := fmt.Sprintf("standby_%d", i+1)
		s := &Server{cluster: c, data: filepath.Join(c.dir, name)}
		from := fmt.Sprintf("host=127.0.0.1 port=%s user=kiln application_name=%s", r.Primary.port, name)
		if err := c.run("pg_basebackup", "-d", from, "-R", "-c", "fast", "--no-sync", "-D", s.data); err != nil {
			return nil, err
		}
		if err := s.start(); err != nil {
			return nil, err
		}
		r.Standbys, r.all = append(r.Standbys, s), append(r.all, s)
		names = append(names, name)
	}
	if n == 0 {
		return r, nil
	}
	if err := r.synchronous("ANY 1 (" + strings.Join(names, ",") + ")"); err != nil {
		return nil, err
	}
	return r, await(r.Primary, "select count(*) from pg_stat_replication where sync_state = 'quorum'", fmt.Sprint(n))
}

// synchronous sets of which standbys the servers wait as primaries; a standby has it from its own settings.
func (r *Replicated) synchronous(names string) error {
	for _, s := range r.all {
		if err := s.synchronous(names); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) synchronous(names string) error {
	line := "synchronous_standby_names = '" + names + "'\n"
	f, err := os.OpenFile(filepath.Join(s.data, "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(line); err != nil {
		return err
	}
	return s.process.Cmd.Process.Signal(syscall.SIGHUP)
}

// await asks until a server gives that answer.
func await(s *Server, sql, want string) error {
	deadline := time.After(time.Minute)
	for tick := time.Tick(10 * time.Millisecond); ; {
		got, err := s.ask(sql)
		if err == nil && got == want {
			return nil
		}
		select {
		case <-tick:
		case <-deadline:
			return fmt.Errorf("%s: %q (%v), want %q; the server said:\n%s", sql, got, err, want, s.said())
		}
	}
}

// URL returns that of a database with all servers as hosts.
func (r *Replicated) URL(database string) string { return urlOf(database, r.all...) }

// KillPrimary kills the primary and its children with SIGKILL.
func (r *Replicated) KillPrimary() { r.Primary.Kill() }

// Promote makes the standby the primary that has received most, once the primary is dead, and has it wait for nobody.
func (r *Replicated) Promote(t testing.TB) {
	t.Helper()
	best, most := -1, ""
	for i, s := range r.Standbys {
		got, err := s.ask("select lpad(to_hex((pg_last_wal_receive_lsn() - '0/0')::bigint), 16, '0')")
		if err != nil {
			t.Fatal(err)
		}
		if got > most {
			best, most = i, got
		}
	}
	s := r.Standbys[best]
	signal := filepath.Join(s.data, "promote")
	err := os.WriteFile(signal, nil, 0o600)
	if as := s.cluster.as; err == nil && as != nil {
		err = os.Chown(signal, int(as.Uid), int(as.Gid))
	}
	if err == nil {
		err = s.process.Cmd.Process.Signal(syscall.SIGUSR1)
	}
	if err == nil {
		err = s.synchronous("")
	}
	if err == nil {
		err = await(s, "select pg_is_in_recovery() or current_setting('synchronous_standby_names') <> ''", "f")
	}
	if err != nil {
		t.Fatal(err)
	}
	r.Primary = s
}
