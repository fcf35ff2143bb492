//! Calls into foreign parsers that may panic on hostile input: a panic becomes an error and prints nothing.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`; `Err` with the panic's message if it panicked. Needs `panic = "unwind"`.
pub fn catch<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |info| {
            // Templates are rendered by a thread, whose panic goes on in the one that waits for it.
            if !QUIET.get() && std::thread::current().name() != Some(rcompile_template::THREAD) {
                previous(info);
            }
        }));
    });
    let before = QUIET.replace(true);
    // What `f` leaves half-changed is thrown away by every caller.
    let result = catch_unwind(AssertUnwindSafe(f));
    QUIET.set(before);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_string()
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_panic_is_an_error() {
        assert_eq!(super::catch(|| 1), Ok(1));
        assert_eq!(super::catch(|| panic!("why {}", 2)), Err::<(), _>("why 2".to_string()));
    }
}
