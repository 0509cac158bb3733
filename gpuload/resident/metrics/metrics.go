// Package metrics says in the text format of Prometheus how a holder of weights stands.
package metrics

import (
	"cmp"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kiln-registry/kiln-registry/gpuload/resident"
)

// Handler answers with the metrics of a server, to anybody and never compressed.
func Handler(s *resident.Server) http.Handler {
	all := prometheus.NewRegistry()
	all.MustRegister(collector{s}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(all, promhttp.HandlerOpts{DisableCompression: true})
}

// collector reads all numbers of a scrape at one moment.
type collector struct{ s *resident.Server }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kiln_resident_"+name, help, labels, nil)
}

var (
	info       = desc("info", "Always 1; the labels say which version runs, and where the weights are.", "version", "backend")
	ready      = desc("ready", "1 while the weights are published, undamaged and not draining.")
	damaged    = desc("damaged", "1 once an audit found other bytes than were published.")
	size       = desc("bytes", "Bytes of the base model, headers included.")
	loaded     = desc("load_seconds", "How long the load took.")
	busy       = desc("load_busy_seconds", "How long each stage of the load (network or read, hash, copy, disk) was at work, summed over the lanes.", "stage")
	leases     = desc("leases", "Attachments that are open.")
	attaches   = desc("attaches_total", "Attachments since the start.")
	refused    = desc("refusals_total", "Connections and requests that were refused, by the code of the answer.", "code")
	audits     = desc("audits_total", "Audits that were begun.")
	failures   = desc("verification_failures_total", "Audits that found other bytes than were published.")
	generation = desc("generation", "Counts from 1 the adapters that came and went.")
	adapters   = desc("adapters", "Adapters that are loaded.")
	adapterSum = desc("adapter_bytes", "Bytes of the adapters that are loaded.")
)

// Describe implements prometheus.Collector.
func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{info, ready, damaged, size, loaded, busy, leases, attaches, refused, audits,
		failures, generation, adapters, adapterSum} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v int64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	snap := c.s.Snapshot()
	gauge(info, 1, c.s.Version, c.s.Backend)
	gauge(ready, number(snap.Ready))
	counter(attaches, snap.Attaches)
	counter(audits, snap.Audits)
	counter(failures, snap.Failures)
	for code, n := range snap.Refused {
		counter(refused, n, code)
	}
	h := snap.Held
	if h == nil {
		return
	}
	gauge(damaged, number(h.Damaged))
	gauge(size, float64(h.Bytes))
	gauge(loaded, snap.Stats.Elapsed.Seconds())
	gauge(busy, snap.Stats.Read.Seconds(), cmp.Or(snap.Stats.Stage, "read")) // as the log calls it
	gauge(busy, snap.Stats.Hash.Seconds(), "hash")
	gauge(busy, snap.Stats.Copy.Seconds(), "copy")
	gauge(busy, snap.Stats.Disk.Seconds(), "disk")
	gauge(leases, float64(h.Leases))
	gauge(generation, float64(h.Generation))
	gauge(adapters, float64(len(h.Adapters)))
	sum := int64(0)
	for _, a := range h.Adapters {
		sum += a.Bytes
	}
	gauge(adapterSum, float64(sum))
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
