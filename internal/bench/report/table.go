package report

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
)

// Table is what one part of a run measured, and when and where.
type Table struct {
	Name    string  `json:"name"`
	Machine Machine `json:"machine"`
	Full    bool    `json:"full"` // the sizes and rounds that the goals name
	Size    int64   `json:"size"` // bytes of a large blob
	Rounds  int     `json:"rounds"`
	Before  string  `json:"load_before"`
	After   string  `json:"load_after"`
	Busy    float64 `json:"busy"` // share of the processor time that others used just before
	Rows    []Row   `json:"rows"`
}

// Quiet says whether the clock on the wall means something.
func (t Table) Quiet() bool { return t.Busy <= BusyLimit }

// Judge skips the goals of wall time unless the machine was quiet.
func (t Table) Judge() Table {
	for i := range t.Rows {
		if r := &t.Rows[i]; r.wall && r.Goal != "" && !t.Quiet() {
			r.State = Skipped
		}
	}
	return t
}

// Print writes the table for people.
func (t Table) Print(w io.Writer) {
	fmt.Fprintf(w, "\n%s: %s\n\n", t.Name, t.circumstances())
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "measure\tvalue\tgoal\t\tnotes")
	for _, r := range t.Rows {
		fmt.Fprintf(columns, "%s\t%s\t%s\t%s\t%s\n", r.What, r.Amount(), r.Goal, r.State, r.Notes)
	}
	columns.Flush()
}

func (t Table) circumstances() string {
	form := "short form"
	if t.Full {
		form = "full form"
	}
	quiet, tcp := "", "" // tables of before do not say
	if t.Machine.TCP != "" {
		tcp = "TCP " + t.Machine.TCP + ", "
	}
	if !t.Quiet() {
		quiet = ", goals of wall time skipped"
	}
	return fmt.Sprintf("%s, %d rounds, blobs of %d MiB; %d cores, %s, Linux %s, %s%s; others used %.0f %% of them%s; "+
		"load %s before, %s after", form, t.Rounds, t.Size>>20, t.Machine.Cores, t.Machine.CPU, t.Machine.Kernel,
		tcp, t.Machine.Go, 100*t.Busy, quiet, t.Before, t.After)
}

// Save writes the table to NAME.json in dir, which is made if it is not there, or to NAME.short.json: a short form takes
// no full one's place.
func (t Table) Save(dir string) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	text, err := json.MarshalIndent(t, "", "  ")
	if err != nil {
		return err
	}
	name := t.Name + ".json"
	if !t.Full {
		name = t.Name + ".short.json"
	}
	return os.WriteFile(filepath.Join(dir, name), append(text, '\n'), 0o666)
}

// Open reads the table in full form that Save wrote under name.
func Open(dir, name string) (Table, error) {
	var t Table
	text, err := os.ReadFile(filepath.Join(dir, name+".json"))
	if err != nil {
		return t, err
	}
	if err := json.Unmarshal(text, &t); err != nil {
		return t, fmt.Errorf("%s.json: %w", name, err)
	}
	return t, nil
}

// markdown is the table for a page.
func (t Table) markdown() string {
	var b strings.Builder
	text := t.circumstances()
	fmt.Fprintf(&b, "%s.\n\n| measure | value | goal | | notes |\n|---|---|---|---|---|\n",
		strings.ToUpper(text[:1])+text[1:])
	for _, r := range t.Rows {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", r.What, r.Amount(), r.Goal, r.State, r.Notes)
	}
	return b.String()
}
