// Package metrics counts and times what a registry does, and says it in the text format of Prometheus. No label is made
// of what a client sends: their values are few, whatever it asks for, and none names a repository.
package metrics

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/registry"
)

// Metrics are those of one registry. They are safe for concurrent use.
type Metrics struct {
	all      *prometheus.Registry
	requests *prometheus.HistogramVec
	failures *prometheus.CounterVec
	index    *prometheus.HistogramVec
	store    *prometheus.CounterVec
	log      *slog.Logger
}

// New returns metrics that say which version runs, and on which kind of store: a word. What goes wrong while they are
// read is logged.
func New(version, store string, log *slog.Logger) *Metrics {
	m := &Metrics{
		all: prometheus.NewRegistry(),
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kiln_http_request_duration_seconds",
			Help: "Requests by route, method and class of status, from the header of the request to the end of the answer.",
			// A HEAD takes under a millisecond, and a shard of 5 GB some minutes.
			Buckets: []float64{.001, .005, .02, .1, .5, 2, 10, 60, 600},
		}, []string{"route", "method", "class"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kiln_request_failures_total",
			Help: "Requests that failed for a reason of the registry's own, or as their client went away.",
		}, []string{"reason"}),
		index: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "kiln_index_duration_seconds",
			Help:    "Transactions of the index: views, and updates with the wait for their sync.",
			Buckets: []float64{.00001, .0001, .001, .005, .02, .1, .5, 2},
		}, []string{"transaction"}),
		store: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kiln_store_errors_total", Help: "Operations of the store that failed, after all tries.",
		}, []string{"op"}),
		log: log,
	}
	for _, op := range ops {
		m.store.WithLabelValues(op)
	}
	for _, r := range reasons {
		m.failures.WithLabelValues(r.word)
	}
	m.failures.WithLabelValues(unknownReason)
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kiln_info", Help: "Always 1; the labels say which version runs, on which kind of store.",
		ConstLabels: prometheus.Labels{"version": version, "store": store},
	})
	info.Set(1)
	m.all.MustRegister(m.requests, m.failures, m.index, m.store, info, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler answers with the metrics, to anybody and never compressed.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.all, promhttp.HandlerOpts{
		DisableCompression: true, ErrorHandling: promhttp.ContinueOnError,
		ErrorLog: slog.NewLogLogger(m.log.Handler(), slog.LevelError),
	})
}

var methods = []string{
	http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
}

// Observe is registry.Config.Observe.
func (m *Metrics) Observe(d registry.Served) {
	route, method := d.Route, d.Method
	if route == "" {
		route = "none"
	}
	if !slices.Contains(methods, method) {
		method = "other"
	}
	class := "none"
	if d.Status >= 100 && d.Status < 600 {
		class = strconv.Itoa(d.Status/100) + "xx"
	}
	m.requests.WithLabelValues(route, method, class).Observe(d.Took.Seconds())
	word := reasonOf(d)
	if word != "" {
		m.failures.WithLabelValues(word).Inc()
	}
	if brokeOff(d) && word != clientGone {
		m.store.WithLabelValues(opRead).Inc()
	}
}

// reasons are the failures that are told apart.
var reasons = []struct {
	err  error
	word string
}{
	{registry.ErrPanic, "panic"},
	{registry.ErrClientGone, clientGone},
	{blobstore.ErrNoSpace, "store_full"},
	{api.ErrStoreFull, "store_full"},
	{blobstore.ErrUnavailable, "store_unavailable"},
	{blobstore.ErrInUse, "store_taken"},
	{blobstore.ErrDamaged, "store_damaged"},
	{blobstore.ErrQuarantined, "blob_damaged"},
	{index.ErrDamaged, "index_damaged"},
	{api.ErrUnavailable, "not_ready"},
}

const (
	clientGone    = "client_gone"
	unknownReason = "other"
)

// brokeOff says whether an answer that had begun well did not come to its end.
func brokeOff(d registry.Served) bool { return d.Err != nil && d.Status >= 200 && d.Status < 300 }

// reasonOf says why a request failed; empty if it did not, or if it was refused for what it asked.
func reasonOf(d registry.Served) string {
	if d.Err == nil {
		return ""
	}
	for _, r := range reasons {
		if errors.Is(d.Err, r.err) {
			return r.word
		}
	}
	if d.Status >= 500 || brokeOff(d) {
		return unknownReason
	}
	return ""
}

// KV times the transactions of an index.
func (m *Metrics) KV(kv index.KV) index.KV {
	return timed{kv, m.index.WithLabelValues("view"), m.index.WithLabelValues("update")}
}

type timed struct {
	index.KV
	view, update prometheus.Observer
}

func (t timed) View(ctx context.Context, fn func(index.Txn) error) error {
	defer since(time.Now(), t.view)
	return t.KV.View(ctx, fn)
}

func (t timed) Update(ctx context.Context, fn func(index.Txn) error) error {
	defer since(time.Now(), t.update)
	return t.KV.Update(ctx, fn)
}

func since(began time.Time, o prometheus.Observer) { o.Observe(time.Since(began).Seconds()) }
