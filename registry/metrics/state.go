package metrics

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// scrapeTimeout is how long the registry is asked for its state.
const scrapeTimeout = 5 * time.Second

// Watch adds the state of a registry: what is read when the metrics are. It may be called once.
func (m *Metrics) Watch(r *registry.Registry) { m.all.MustRegister(&state{r, m}) }

// state reads a registry.
type state struct {
	reg *registry.Registry
	m   *Metrics
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	received = desc("kiln_http_received_bytes_total", "Bytes of bodies of requests, also of those that run.")
	sent     = desc("kiln_http_sent_bytes_total", "Bytes of bodies of answers, also of those that run.")
	running  = desc("kiln_http_requests_running", "Requests that are being answered.")
	isReady  = desc("kiln_ready", "1 when /readyz says so, else 0.")

	uploads  = desc("kiln_uploads_open", "Uploads that were begun and have not ended, of this and of earlier processes.")
	refsAt   = desc("kiln_refs_position", "Position of the store up to which changes of manifests and tags are known.")
	indexAt  = desc("kiln_index_position", "Position of the store up to which the index has them; less: it lags behind.")
	asideNow = desc("kiln_quarantined_blobs", "Blobs that were set aside as they are damaged.")
	lostNow  = desc("kiln_missing_blobs", "Blobs that manifests refer to and that the store was found not to have.")
	badNow   = desc("kiln_unusable_blobs",
		"Blobs that are in the store and can't be used, by what was found: damaged ones that could not be set aside, and "+
			"those that could not be read.", "verdict")

	gcEnded = desc("kiln_gc_last_end_timestamp_seconds", "When the last collection ended that ran to its end.")
	gcTook  = desc("kiln_gc_last_duration_seconds", "How long that collection took.")
	gcBlobs = desc("kiln_gc_last_blobs", "Blobs that it found, by what became of them.", "state")
	gcBytes = desc("kiln_gc_last_bytes", "Bytes of those.", "state")

	gcRuns = desc("kiln_gc_runs_total", "Collections since the start, dry runs aside; failed: did not run to their end.",
		"result")
	gcGoneBlobs = desc("kiln_gc_removed_blobs_total", "Blobs that collections have removed since the start.")
	gcGoneBytes = desc("kiln_gc_removed_bytes_total", "Bytes of those.")

	scrubBegan = desc("kiln_scrub_begin_timestamp_seconds",
		"When the pass over all blobs began that runs, or the last one.")
	scrubEnded = desc("kiln_scrub_end_timestamp_seconds", "When it ended; absent while it runs.")
	scrubBlobs = desc("kiln_scrub_blobs", "Blobs that it has read so far.")
	scrubBytes = desc("kiln_scrub_read_bytes", "Bytes of those.")
	scrubFound = desc("kiln_scrub_findings", "Blobs that were not read well, by what was found; records: 1 if the refs of the store are damaged.", "verdict")

	allBlobs = desc("kiln_scrub_read_blobs_total",
		"Blobs that were read again since the start: by passes, by command, or as they were suspect.")
	allBytes = desc("kiln_scrub_read_bytes_total", "Bytes of those.")
	allFound = desc("kiln_scrub_findings_total", "What was found wrong with them, since the start.", "verdict")
	allGiven = desc("kiln_scrub_midstates_total", "Those of them that had no midstates, or wrong ones, and were given some.")
)

// Describe implements prometheus.Collector.
func (s *state) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		received, sent, running, isReady, uploads, refsAt, indexAt, asideNow, lostNow, badNow, gcEnded, gcTook, gcBlobs, gcBytes,
		gcRuns, gcGoneBlobs, gcGoneBytes, allBlobs, allBytes, allFound, allGiven, scrubBegan, scrubEnded, scrubBlobs, scrubBytes,
		scrubFound,
	} {
		to <- d
	}
}

// out sends samples.
type out chan<- prometheus.Metric

func (o out) gauge(d *prometheus.Desc, v float64, labels ...string) {
	o <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (o out) counter(d *prometheus.Desc, v int64, labels ...string) {
	o <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}

func (o out) time(d *prometheus.Desc, t time.Time) {
	if !t.IsZero() {
		o.gauge(d, float64(t.UnixMilli())/1000)
	}
}

// Collect implements prometheus.Collector. What can't be found out is left out and logged.
func (s *state) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	o := out(to)
	t := s.reg.Traffic()
	o.counter(received, t.Received)
	o.counter(sent, t.Sent)
	o.gauge(running, float64(t.Running))
	h := s.reg.Health()
	up := 0.0
	if h.Status != "maintenance" {
		up = 1
	}
	o.gauge(isReady, up)
	o.gauge(asideNow, float64(h.Quarantined))
	o.gauge(lostNow, float64(h.Missing))
	o.gauge(badNow, float64(h.Damaged), "damaged")
	o.gauge(badNow, float64(h.Unreadable), "unreadable")
	if n, err := s.reg.OpenUploads(ctx); err != nil {
		s.m.log.Error("metrics: count uploads", "error", err)
	} else {
		o.gauge(uploads, float64(n))
	}
	if store, ix, err := s.reg.Positions(ctx); err != nil {
		s.m.log.Error("metrics: position of the index", "error", err)
	} else {
		o.gauge(refsAt, float64(store))
		o.gauge(indexAt, float64(ix))
	}
	s.upkeep(o)
}

func (s *state) upkeep(o out) {
	if c := s.reg.Collector().Last(); c != nil {
		o.time(gcEnded, c.Ended)
		o.gauge(gcTook, c.Ended.Sub(c.Began).Seconds())
		for state, n := range map[string]struct{ blobs, bytes int64 }{
			"held": {c.Held.Blobs, c.Held.Bytes}, "leased": {c.Leased.Blobs, c.Leased.Bytes},
			"young": {c.Young.Blobs, c.Young.Bytes}, "unused": {c.Unused.Blobs, c.Unused.Bytes},
			"removed": {c.Removed.Blobs, c.Removed.Bytes},
		} {
			o.gauge(gcBlobs, float64(n.blobs), state)
			o.gauge(gcBytes, float64(n.bytes), state)
		}
	}
	gc := s.reg.Collector().Totals()
	o.counter(gcRuns, gc.Ended, "ended")
	o.counter(gcRuns, gc.Failed, "failed")
	o.counter(gcGoneBlobs, gc.Removed.Blobs)
	o.counter(gcGoneBytes, gc.Removed.Bytes)
	all := s.reg.Scrubber().Totals()
	o.counter(allBlobs, all.Read.Blobs)
	o.counter(allBytes, all.Read.Bytes)
	for verdict, n := range verdicts(all) {
		o.counter(allFound, n, verdict)
	}
	o.counter(allGiven, all.Midstates)
	p := s.reg.Scrubber().Pass()
	if p.Began.IsZero() {
		return
	}
	o.time(scrubBegan, p.Began)
	o.time(scrubEnded, p.Ended)
	o.gauge(scrubBlobs, float64(p.Read.Blobs))
	o.gauge(scrubBytes, float64(p.Read.Bytes))
	for verdict, n := range verdicts(p) {
		o.gauge(scrubFound, float64(n), verdict)
	}
	records := 0.0
	if p.Records != "" {
		records = 1
	}
	o.gauge(scrubFound, records, "records")
}

// verdicts are what was found, but good blobs.
func verdicts(s upkeep.Scrubbing) map[string]int64 {
	return map[string]int64{
		"damaged": s.Damaged, "unsteady": s.Unsteady, "unreadable": s.Unreadable, "missing": s.Missing,
	}
}
