package testpg

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if os.Getenv("KILN_TESTPG_HOLD") != "" {
		os.Exit(hold())
	}
	Main(m)
}

// hold starts a server, says where it listens and waits to be killed.
func hold() int {
	s, err := single(".")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(s.port, s.cluster.dir)
	select {}
}

func TestDatabase(t *testing.T) {
	s := Shared(t)
	a, b := s.Database(t), s.Database(t)
	Exec(t, a, "create table t (n int)")
	if got := Exec(t, b, "select to_regclass('t') is null"); got != "t" {
		t.Errorf("two databases are one: %s", got)
	}
	if _, err := ask(strings.Replace(a, password, "another", 1), "select 1"); err == nil {
		t.Error("a wrong password is taken")
	}
}

// TestPromote: what the primary acknowledged before it was killed is on the standby that is promoted.
func TestPromote(t *testing.T) {
	r := NewReplicated(t, 2)
	Exec(t, r.URL("postgres"), "create table t as select 1 as n")
	r.KillPrimary()
	if _, err := r.Primary.ask("select 1"); err == nil {
		t.Error("the primary answers after it was killed")
	}
	r.Promote(t)
	Exec(t, r.Primary.URL("postgres"), "insert into t values (2)")
	if got := Exec(t, r.Primary.URL("postgres"), "select string_agg(n::text, ',' order by n) from t"); got != "1,2" {
		t.Errorf("the new primary has %q", got)
	}
}

// TestKilled: a server does not outlive the process that started it.
func TestKilled(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "KILN_TESTPG_HOLD=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	port, dir, ok := strings.Cut(strings.TrimSpace(line), " ")
	if err != nil || !ok {
		t.Fatal(line, err)
	}
	defer os.RemoveAll(dir)
	address := "127.0.0.1:" + port
	deadline := time.After(30 * time.Second)
	for tick := time.Tick(10 * time.Millisecond); ; {
		c, err := net.Dial("tcp", address)
		if errors.Is(err, syscall.ECONNREFUSED) {
			return
		}
		if err == nil {
			c.Close()
		}
		select {
		case <-tick:
		case <-deadline:
			t.Fatalf("the server at %s outlives the process that started it", address)
		}
	}
}

func TestMissing(t *testing.T) {
	t.Setenv("KILN_TEST_PG", t.TempDir())
	if _, err := programs("."); err == nil || !strings.Contains(err.Error(), "make test") {
		t.Errorf("a folder without PostgreSQL: %v", err)
	}
}
