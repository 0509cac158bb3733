package gpuload

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// edit is a text that a source file has once, and what stands in its place.
type edit struct{ file, old, new string }

// withoutHash leaves the hash out of the loader. The product has no switch for that: only here, with other code, is it
// seen what hashing costs.
var withoutHash = []edit{{"gpuload/lane.go", "hash(&l.pool, h, c.data)", ""}}

// build builds program load from the source in the module's folder, with some texts of it replaced.
func build(ctx context.Context, to string, edits []edit) error {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return fmt.Errorf("find the source of the loader: %w", err)
	}
	root := filepath.Dir(strings.TrimSpace(string(out)))
	overlay, err := replace(root, to, edits)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-overlay", overlay, "-o", to, "./internal/bench/gpuload/load")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the loader that is measured: %w: %s", err, out)
	}
	return nil
}

// replace writes the changed files beside to, and the list of them that the compiler takes.
func replace(root, to string, edits []edit) (string, error) {
	replaced := map[string]string{}
	for i, e := range edits {
		path := filepath.Join(root, e.file)
		from := path
		if changed, ok := replaced[path]; ok {
			from = changed
		}
		text, err := os.ReadFile(from)
		if err != nil {
			return "", err
		}
		if n := strings.Count(string(text), e.old); n != 1 {
			return "", fmt.Errorf("%s has %q %d times, not once: say anew in internal/bench/gpuload how it hashes", e.file,
				e.old, n)
		}
		replaced[path] = fmt.Sprintf("%s.%d.go", to, i)
		changed := strings.Replace(string(text), e.old, e.new, 1)
		if err := os.WriteFile(replaced[path], []byte(changed), 0o666); err != nil {
			return "", err
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replaced})
	if err != nil {
		return "", err
	}
	return to + ".json", os.WriteFile(to+".json", text, 0o666)
}
