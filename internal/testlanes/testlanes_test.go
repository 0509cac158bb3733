package testlanes_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
)

func TestMain(m *testing.M) { testlanes.Use(m).Run() }

// TestUsed is also what TestKept has the go command run.
func TestUsed(t *testing.T) {
	if one := lanes.Width() == 1; os.Getenv("KILN_LANES") == "x1" && !one {
		t.Errorf("x1 takes %d streams at once", lanes.Width())
	}
}

// TestKept: the go command shows a result again for the same kernel only, and an unknown name fails with one line.
func TestKept(t *testing.T) {
	for _, tt := range []struct {
		name string
		ok   bool
		want string
	}{
		{"", true, ""},
		{"x1", true, ""},
		{"x1", true, "(cached)"},
		{"x5", false, "error: KILN_LANES: no kernel is named \"x5\": want x1, x4 or x16\nFAIL\t"},
	} {
		cmd := exec.Command("go", "test", "-run", "^TestUsed$", ".")
		cmd.Env = append(os.Environ(), "KILN_LANES="+tt.name)
		out, err := cmd.CombinedOutput()
		if ok := err == nil; ok != tt.ok || !strings.Contains(string(out), tt.want) {
			t.Errorf("%q: %v\n%s", tt.name, err, out)
		}
	}
}
