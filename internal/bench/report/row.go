// Package report holds what bench measured, says whether it reached its goals, and prints it, for people and for the
// documentation.
package report

import (
	"fmt"
	"math"
)

// State says whether a row reached its goal.
type State string

// The states of a row. The zero value is that of a row without a goal, which is for reading.
const (
	Met     State = "met"
	Missed  State = "MISSED"
	Skipped State = "skipped: busy" // see Row.OfWall
)

// Row is one line of a table. A ratio has no unit.
type Row struct {
	What  string  `json:"what"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit,omitempty"`
	Goal  string  `json:"goal,omitempty"`
	State State   `json:"state,omitempty"`
	Notes string  `json:"notes,omitempty"`

	wall bool
}

// OfWall marks the goal as one about the clock on the wall, which means nothing while others use the machine.
func (r Row) OfWall() Row {
	r.wall = true
	return r
}

// AtMost returns the row with a goal: its value must not exceed limit.
func (r Row) AtMost(limit float64) Row { return r.with("≤ ", limit, r.Value <= limit) }

// AtLeast returns the row with a goal: its value must reach limit.
func (r Row) AtLeast(limit float64) Row { return r.with("≥ ", limit, r.Value >= limit) }

func (r Row) with(sign string, limit float64, met bool) Row {
	r.Goal, r.State = sign+number(limit)+r.Unit, Missed
	if met {
		r.State = Met
	}
	return r
}

// Amount is the value with its unit.
func (r Row) Amount() string { return number(r.Value) + r.Unit }

// number prints v with two decimals, or with two digits where it is smaller than that shows.
func number(v float64) string {
	if a := math.Abs(v); a == 0 || a >= 0.1 {
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.2g", v)
}
