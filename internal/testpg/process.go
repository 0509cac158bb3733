package testpg

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// programs returns the folder of PostgreSQL's programs: $KILN_TEST_PG, or what make test has put into .tools, or the
// newest of those that Debian has installed.
func programs(root string) (string, error) {
	if bin := os.Getenv("KILN_TEST_PG"); bin != "" {
		return bin, usable(bin)
	}
	for _, pattern := range []string{filepath.Join(root, ".tools/postgres/usr"), "/usr"} {
		found, _ := filepath.Glob(filepath.Join(pattern, "lib/postgresql/*/bin"))
		slices.SortFunc(found, func(a, b string) int { return release(b) - release(a) })
		for _, bin := range found {
			if usable(bin) == nil {
				return bin, nil
			}
		}
	}
	return "", fmt.Errorf("no PostgreSQL for the tests (hint: make test, or set KILN_TEST_PG to its bin folder)")
}

func release(bin string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(bin)))
	return n
}

func usable(bin string) error {
	for _, name := range []string{"postgres", "initdb", "pg_basebackup"} {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			return fmt.Errorf("no PostgreSQL for the tests: %w (hint: make test)", err)
		}
	}
	return nil
}

// owner is who runs the servers: PostgreSQL refuses root. nil: the user who runs the test.
func owner() (*syscall.Credential, error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, fmt.Errorf("PostgreSQL does not run as root, and there is no user postgres or nobody")
}

// cluster is what the servers of a test have in common.
type cluster struct {
	bin string
	as  *syscall.Credential
	dir string // of the owner; the folders of the servers are in it
}

func newCluster(root string) (*cluster, error) {
	bin, err := programs(root)
	if err != nil {
		return nil, err
	}
	as, err := owner()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "kiln-test-pg-")
	if err == nil && as != nil {
		err = os.Chown(dir, int(as.Uid), int(as.Gid))
	}
	return &cluster{bin, as, dir}, err
}

// command is one of PostgreSQL's programs, as the owner and with no environment that changes what it does.
func (c *cluster) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(c.bin, name), args...)
	cmd.Dir = c.dir
	libs, _ := filepath.Glob(filepath.Join(c.bin, "../../../*-linux-gnu")) // of a PostgreSQL that is not installed
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C", "TZ=UTC", "PGPASSWORD=" + password,
		"LD_LIBRARY_PATH=" + strings.Join(libs, ":")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.as, Pdeathsig: syscall.SIGQUIT}
	return cmd
}

// run runs a program to its end.
func (c *cluster) run(name string, args ...string) error {
	out, err := c.command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s (as uid %d): %w\n%s", filepath.Join(c.bin, name), os.Getuid(), err, out)
	}
	return nil
}

// process is a server, with its children, that ends when the test's process does.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

func start(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd, make(chan struct{})}
	started := make(chan error)
	go func() { // its end is signaled when the thread ends that started it
		runtime.LockOSThread()
		defer close(p.done)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
	}()
	return p, <-started
}

// signal sends a signal and waits until the server has ended.
func (p *process) signal(s os.Signal) {
	_ = p.cmd.Process.Signal(s)
	patience := time.NewTimer(10 * time.Second)
	defer patience.Stop()
	select {
	case <-p.done:
	case <-patience.C:
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// kill kills the server and its children at once, as a machine that loses power does.
func (p *process) kill() {
	all := append(children(p.cmd.Process.Pid), p.cmd.Process.Pid)
	for _, pid := range all {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	<-p.done
}

// children are the processes whose parent has a pid.
func children(pid int) (found []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range all {
		b, _ := os.ReadFile(path)
		after := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]) // state, parent, ...
		if len(after) > 1 && string(after[1]) == strconv.Itoa(pid) {
			child, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			found = append(found, child)
		}
	}
	return found
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
