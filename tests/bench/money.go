package main

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/latchkey-go/latchkey/repository"
)

var moneyMethods = []string{"Deposit", "Withdraw", "Transfer"}

// moneyTrips counts the round trips of the money methods on a warm connection.
func (l *lab) moneyTrips(ctx context.Context) (map[string]int, error) {
	w := &world{url: l.at(time.Millisecond), over: ctx}
	defer w.close()
	repo, err := openRepository(ctx, w, true)
	if err != nil {
		return nil, err
	}
	from, err := repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: uuid.New()})
	to, toErr := repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: uuid.New()})
	if err := errors.Join(err, toErr); err != nil {
		return nil, err
	}
	trips := make(map[string]int)
	for range 3 { // the first prepares
		for _, method := range moneyMethods {
			l.proxy.record()
			var err error
			switch method {
			case "Deposit":
				_, err = repo.Deposit(ctx, repository.DepositParams{AccountID: from.ID, Amount: 100})
			case "Withdraw":
				_, err = repo.Withdraw(ctx, repository.WithdrawParams{AccountID: from.ID, Amount: 1})
			default:
				_, err = repo.Transfer(ctx, repository.TransferParams{From: from.ID, To: to.ID, Amount: 1})
			}
			trips[method] = len(l.proxy.recorded())
			if err != nil {
				return nil, err
			}
		}
	}
	return trips, nil
}
