package repository_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"

	"github.com/latchkey-go/latchkey/repository"
)

var (
	repo    *repository.Repository
	tickets = repository.MustNamespace("ticket")
)

func ExampleRepository_CreateSetup() {
	_, err := repo.CreateSetup(context.Background(), uuid.New(), &repository.CreateSetupOpts{MaxPending: 3})
	var limit *repository.LimitError
	switch {
	case errors.As(err, &limit):
		fmt.Printf("%d of %d are pending\n", limit.Used, limit.Limit)
	case repository.IsRetryable(err):
		fmt.Println("try again")
	}
}

func ExampleRepository_Guard() {
	errTooMany := errors.New("too many open tickets")
	locks := []repository.Lock{tickets.Exclusive("customer 7")}
	err := repo.Guard(context.Background(), locks, func(ctx context.Context, tx *repository.Tx) error {
		var open int
		err := tx.QueryRow(ctx, "SELECT count(*) FROM tickets WHERE customer = $1 AND open", "7").Scan(&open)
		if err != nil {
			return err
		}
		if open >= 3 {
			return errTooMany
		}
		_, err = tx.Last().Exec(ctx, "INSERT INTO tickets (customer, open) VALUES ($1, true)", "7")
		return err
	})
	if errors.Is(err, errTooMany) {
		fmt.Println(err)
	}
}
