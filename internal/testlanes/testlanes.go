// Package testlanes has the tests of a package hash with the kernel that KILN_LANES names: x1, x4 or x16, and otherwise
// the best of this processor. Only tests import it.
package testlanes

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"

	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

const variable = "KILN_LANES"

// Runner is what runs the tests of a package, such as a *testing.M.
type Runner interface{ Run() int }

// Use makes everything in this process hash with the kernel from now on, and returns what runs the tests of m. A name
// that this processor can't use ends the process with one line and the exit code 2. It is the first call of a TestMain:
//
//	func TestMain(m *testing.M) { testlanes.Use(m).Run() }
func Use(m Runner) Runner {
	if err := lanes.Use(os.Getenv(variable)); err != nil {
		fmt.Fprintf(os.Stderr, "error: %s: %v\n", variable, err)
		os.Exit(2)
	}
	return noting{m}
}

// noting tells the go command that the tests depend on the variable. It learns by itself only of those that are read
// while tests run, and would show the results of one kernel for another.
type noting struct{ Runner }

// Run implements Runner.
func (n noting) Run() int {
	code := n.Runner.Run()
	if err := note(); err != nil {
		fmt.Fprintln(os.Stderr, "error: note what the tests depend on:", err)
		os.Exit(1)
	}
	return code
}

// note adds to the list of what the tests have read, which the go command asks for where it may keep the result.
func note() error {
	list := flag.Lookup("test.testlogfile")
	if list == nil || list.Value.String() == "" {
		return nil
	}
	f, err := os.OpenFile(list.Value.String(), os.O_WRONLY|os.O_APPEND, 0)
	if errors.Is(err, fs.ErrNotExist) { // no test ran: they were listed
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := f.WriteString("getenv " + variable + "\n"); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
