package keyqueue_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/keyqueue"
)

func noBatch(context.Context, *keyqueue.Batch[int]) {}

func BenchmarkAKeyThatNobodyElseWants(b *testing.B) {
	b.ReportAllocs()
	q := keyqueue.New(1, 100, 64, noBatch)
	locks, deadline := exclusive(1), time.Now().Add(far)
	for b.Loop() {
		t := keyqueue.Ticket[int]{Locks: locks, Deadline: deadline, Together: true}
		if err := q.Enter(b.Context(), &t); err != nil {
			b.Fatal(err)
		}
		q.Leave(&t)
	}
}

func BenchmarkAKeyThat256Want(b *testing.B) {
	for name, maxBatch := range map[string]int{"each alone": 0, "together": 64} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			q := keyqueue.New(1, 1000, maxBatch, func(_ context.Context, batch *keyqueue.Batch[int]) {
				batch.Depart()
				batch.End(nil, false)
			})
			locks, deadline := exclusive(1), time.Now().Add(far)
			turns := make(chan struct{}, 256)
			var wg sync.WaitGroup
			for range 256 {
				wg.Go(func() {
					for range turns {
						t := keyqueue.Ticket[int]{Locks: locks, Deadline: deadline, Together: true}
						if err := q.Enter(b.Context(), &t); err != nil {
							b.Error(err)
						}
						if !t.Done() {
							q.Leave(&t)
						}
					}
				})
			}
			for b.Loop() {
				turns <- struct{}{}
			}
			close(turns)
			wg.Wait()
			require.Zero(b, q.Len())
		})
	}
}
