package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

type status string

const (
	ok      status = "ok"
	failed  status = "failed"
	leftOut status = "left out"
)

// row is one line of the table.
type row struct {
	Name   string
	Figure string
	Status status
	Why    string // of what failed or was left out
	Must   bool   // the exit status depends on it
}

// report is what a part is given: it sends each row as soon as it is known.
type report struct {
	config
	out *json.Encoder
}

func (r *report) send(x row) error {
	x.Figure, x.Why = oneLine(x.Figure), oneLine(x.Why)
	return r.out.Encode(x)
}

// figure reports a number that holds nothing up.
func (r *report) figure(name, format string, args ...any) error {
	return r.send(row{Name: name, Figure: fmt.Sprintf(format, args...), Status: ok})
}

// goal reports a number that is to be reached, need one that must.
func (r *report) goal(name, goal string, reached bool, format string, args ...any) error {
	x := row{Name: name, Figure: fmt.Sprintf(format, args...), Status: ok}
	if !reached {
		x.Status, x.Why = failed, "goal: "+goal
	}
	return r.send(x)
}

func (r *report) need(name, what string, holds bool, format string, args ...any) error {
	x := row{Name: name, Figure: fmt.Sprintf(format, args...), Status: ok, Must: true}
	if !holds {
		x.Status, x.Why = failed, "must be: "+what
	}
	return r.send(x)
}

func (r *report) leave(name string, why any) error {
	return r.send(row{Name: name, Status: leftOut, Why: fmt.Sprint(why)})
}

// oneLine makes a text fit for a cell.
func oneLine(s string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(s), " "), "|", "/")
}

// table is all rows.
type table struct {
	rows   []row
	broken bool // there is no device
}

func (t *table) add(r row) { t.rows = append(t.rows, r) }

func (t *table) held() bool {
	for _, r := range t.rows {
		if r.Must && r.Status == failed {
			return false
		}
	}
	return true
}

// print writes the table as Markdown, as it goes into doc/performance.md.
func (t *table) print(w io.Writer) error {
	cells := [][3]string{{"what", "figure", "holds"}}
	for _, r := range t.rows {
		holds := string(r.Status)
		if r.Why != "" {
			holds += " (" + r.Why + ")"
		}
		cells = append(cells, [3]string{r.Name, r.Figure, holds})
	}
	var width [3]int
	for _, c := range cells {
		for i := range c {
			width[i] = max(width[i], utf8.RuneCountInString(c[i]))
		}
	}
	for i, c := range cells {
		line := fmt.Sprintf("| %-*s | %-*s | %-*s |\n", width[0], c[0], width[1], c[1], width[2], c[2])
		if i == 0 {
			line += fmt.Sprintf("|%s|%s|%s|\n", strings.Repeat("-", width[0]+2), strings.Repeat("-", width[1]+2),
				strings.Repeat("-", width[2]+2))
		}
		if _, err := io.WriteString(w, line); err != nil {
			return err
		}
	}
	return nil
}
