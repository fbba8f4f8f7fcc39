-- The demo's shop: orders that become invoices.  Run as role shop, who is no
-- superuser and owns nothing but its schema.

CREATE TABLE product (
	name text PRIMARY KEY,
	price numeric(8, 2) NOT NULL,
	stock int NOT NULL CHECK (stock >= 0)
);
INSERT INTO product VALUES
	('teapot', 24.90, 5000), ('cup', 6.50, 5000), ('kettle', 39.00, 5000),
	('sieve', 4.20, 5000), ('tray', 12.75, 5000);

CREATE TABLE invoice (
	number int GENERATED ALWAYS AS IDENTITY,
	order_number int NOT NULL UNIQUE,
	customer text NOT NULL,
	amount numeric(10, 2) NOT NULL,
	attempt int NOT NULL
);

-- The queue is an ordinary table.  Delivered orders stay in it, marked, since
-- it keeps what is processed; those given up go to a table of their own.
SELECT ruststream.create_queue('orders', keep_processed => true);
CREATE TABLE dead_orders (LIKE orders);

-- The handler: what it writes and the end of its task are one commit.
CREATE FUNCTION make_invoice(task jsonb, delivery ruststream.delivery) RETURNS ruststream.outcome
LANGUAGE plpgsql AS $$
DECLARE
	price numeric;
BEGIN
	UPDATE product SET stock = stock - (task ->> 'quantity')::int
		WHERE name = task ->> 'product'
		RETURNING product.price INTO price;
	INSERT INTO invoice (order_number, customer, amount, attempt)
		VALUES ((task ->> 'order')::int, task ->> 'customer',
				price * (task ->> 'quantity')::int, delivery.attempt);

	-- Now the tax office is asked, which takes a moment and does not always
	-- answer.  A failure here undoes the stock and the invoice above.
	PERFORM pg_sleep(0.004);
	IF (task ->> 'order')::int % 50 = 0 AND delivery.attempt <= 2 THEN
		RAISE EXCEPTION 'the tax office does not answer'
			USING HINT = 'It will in a moment.';
	END IF;
	RETURN ruststream.ack();
END $$;

SELECT ruststream.subscribe('invoicing', 'orders', 'make_invoice',
	workers => 2, max_attempts => 5, dead_letter => 'dead_orders',
	retry_delay => '250 ms');
SELECT ruststream.pause('invoicing');
