"""What a rank keeps between launches: device tables, pages, recurrent slots, weights and experts."""
