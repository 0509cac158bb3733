package testpg

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/kiln-registry/kiln-registry/internal/testproc"
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
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.as}
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

// kill kills a server and its children at once, as a machine that loses power does.
func kill(p *testproc.Process) {
	all := append(children(p.Cmd.Process.Pid), p.Cmd.Process.Pid)
	for _, pid := range all {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	<-p.Done
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
