//! Slow start for batches of similar requests: if one fails, the others are likely to fail, too.

use std::future::Future;

use futures_util::future::join_all;

/// Calls `work` for 0 to `count` in parallel batches of 1, 2, 4 and so on, as long as a whole batch succeeds.
/// Returns the number of successes and the first failure (upstream's `slowStartBatch`).
pub async fn slow_start<E, Work>(count: usize, work: impl Fn(usize) -> Work) -> (usize, Option<E>)
where
    Work: Future<Output = Result<(), E>>,
{
    let (mut started, mut succeeded, mut size) = (0, 0, 1);
    while started < count {
        let batch = started..(started + size).min(count);
        started = batch.end;
        size *= 2;
        let mut failure = None;
        for result in join_all(batch.map(&work)).await {
            match result {
                Ok(()) => succeeded += 1,
                Err(error) => _ = failure.get_or_insert(error),
            }
        }
        if failure.is_some() {
            return (succeeded, failure);
        }
    }
    (succeeded, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[tokio::test]
    async fn batch_size_grows_until_failure() {
        for (count, fails_from, expected) in [
            (0, 0, (0, None, 0)),
            (7, 99, (7, None, 7)),
            // The first call fails: no further call is made.
            (7, 0, (0, Some(0), 1)),
            // The second batch is 1 and 2, the third 3 to 6.
            (20, 2, (2, Some(2), 3)),
            (20, 5, (5, Some(5), 7)),
        ] {
            let attempts = RefCell::new(0);
            let work = |i: usize| {
                *attempts.borrow_mut() += 1;
                async move { if i < fails_from { Ok(()) } else { Err(i) } }
            };
            let (succeeded, failure) = slow_start(count, work).await;
            assert_eq!((succeeded, failure, *attempts.borrow()), expected, "{count} {fails_from}");
        }
    }
}
