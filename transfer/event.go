// Package transfer moves models between a directory and a registry: it selects the files, hashes, pushes, pulls,
// verifies and compares them. Memory does not grow with the size of a file.
package transfer

// Step says what an Event reports.
type Step string

// The steps.
const (
	Planned Step = "planned"  // Total more bytes belong to the phase
	Moved   Step = "progress" // Bytes of the file are done
	Done    Step = "done"     // the file is done
	Skipped Step = "skipped"  // nothing has to be done for the file; Note says why. Its bytes were not planned
	Noted   Step = "note"     // Note is for people
)

// The phases.
const (
	PhaseHash     = "hash"
	PhaseUpload   = "upload"
	PhaseDownload = "download"
	PhaseVerify   = "verify"
	PhaseCopy     = "copy" // from a cache on another filesystem, or to a file that must have its bytes alone
)

// Event is one step of a transfer.
type Event struct {
	Step  Step   `json:"event"`
	Phase string `json:"phase,omitempty"`
	File  string `json:"file,omitempty"`
	Bytes int64  `json:"bytes,omitempty"` // done of this file so far, never falling within one try
	Total int64  `json:"total,omitempty"` // of this file
	Note  string `json:"note,omitempty"`
}

// Watch is told of events. It is called from several goroutines at a time, as often as once per piece, and must not
// block for long. A nil Watch is told nothing.
type Watch func(Event)

func (w Watch) tell(e Event) {
	if w != nil {
		w(e)
	}
}
