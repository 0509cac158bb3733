package resident

import (
	"context"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
)

// adapterRoutes adds the routes of adapters. base is the pattern of the path of the base.
func (s *Server) adapterRoutes(base string, all map[string]route) {}

// adapters lists what is loaded on the base.
func (h *Held) adapters() []attach.LoadedAdapter { return []attach.LoadedAdapter{} }

// generation counts from 1 what came to the base and went.
func (h *Held) generation() uint64 { return 1 }

// wait returns the generation when it is above after, or ctx has ended.
func (h *Held) wait(ctx context.Context, after uint64) uint64 {
	if after >= h.generation() {
		<-ctx.Done()
	}
	return h.generation()
}

// auditAdapters reads back what is loaded on the base.
func (h *Held) auditAdapters(ctx context.Context) error { return ctx.Err() }

// closeAdapters frees what is loaded on the base, when nobody has it attached or ctx ends.
func (h *Held) closeAdapters(context.Context) error { return nil }
