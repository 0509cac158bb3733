package report

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestGoals(t *testing.T) {
	for _, c := range []struct {
		row   Row
		goal  string
		state State
	}{
		{Row{Value: 0.85}.AtMost(0.85), "≤ 0.85", Met},
		{Row{Value: 0.86}.AtMost(0.85), "≤ 0.85", Missed},
		{Row{Value: 1.36}.AtLeast(1.35), "≥ 1.35", Met},
		{Row{Value: 1, Unit: " %"}.AtMost(0.01), "≤ 0.01 %", Missed},
		{Row{Value: 1}, "", ""},
	} {
		if c.row.Goal != c.goal || c.row.State != c.state {
			t.Errorf("%+v: want %q, %q", c.row, c.goal, c.state)
		}
	}
}

// TestBusy: a goal of wall time is judged on a quiet machine only, all others always.
func TestBusy(t *testing.T) {
	rows := func() []Row {
		return []Row{Row{Value: 2}.AtMost(1).OfWall(), Row{Value: 2}.AtMost(1), Row{Value: 2}.OfWall()}
	}
	states := func(rows []Row) (all []State) {
		for _, r := range rows {
			all = append(all, r.State)
		}
		return all
	}
	quiet, busy := Table{Busy: BusyLimit, Rows: rows()}.Judge(), Table{Busy: BusyLimit + 0.01, Rows: rows()}.Judge()
	if d := cmp.Diff([]State{Missed, Missed, ""}, states(quiet.Rows)); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]State{Skipped, Missed, ""}, states(busy.Rows)); d != "" {
		t.Error(d)
	}
	if share := Busy(time.Millisecond); share < 0 || share > 1 {
		t.Errorf("busy: %f", share)
	}
}

// TestRewrite: a block takes the table of its name, and all else stays, also when it is made anew. What is not there in full form
// replaces nothing.
func TestRewrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "page.md")
	const page = "# Page\n<!-- bench: pull -->\nold\n<!-- /bench -->\nbetween\n" +
		"<!-- bench: absent -->\nkept\n<!-- /bench -->\n<!-- bench: pull short -->\nlong\n<!-- /bench -->\nend\n"
	if err := os.WriteFile(path, []byte(page), 0o666); err != nil {
		t.Fatal(err)
	}
	table := Table{Name: "pull", Rounds: 7, Full: true, Rows: []Row{Row{What: "wall", Value: 0.5}.AtMost(1).OfWall()}}
	for _, table := range []Table{table, {Name: "short", Rounds: 3}, {Name: "pull", Rounds: 3}} { // the last one is short
		if err := table.Save(dir); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		put, left, err := Rewrite(path, dir)
		if d := cmp.Diff([][]string{{"pull"}, {"absent", "pull", "short"}}, [][]string{put, left}); d != "" || err != nil {
			t.Fatal(err, d)
		}
	}
	short, err := os.ReadFile(filepath.Join(dir, "pull.short.json"))
	if err != nil || !strings.Contains(string(short), `"rounds": 3`) {
		t.Errorf("the short form: %s, %v", short, err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"# Page\n<!-- bench: pull -->\nFull form, 7 rounds",
		"| wall | 0.50 | ≤ 1.00 | met |  |\n<!-- /bench -->\nbetween\n",
		"<!-- bench: absent -->\nkept\n<!-- /bench -->\n",
		"<!-- bench: pull short -->\nlong\n<!-- /bench -->\nend\n",
	} {
		if strings.Count(string(got), want) != 1 {
			t.Errorf("%q is not there once:\n%s", want, got)
		}
	}
	if err := os.WriteFile(path, []byte("<!-- bench: pull -->\nopen\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Rewrite(path, dir); err == nil {
		t.Error("a block that does not end was taken")
	}
}
