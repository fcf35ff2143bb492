//! parse -> Command -> verbs::dispatch -> exit code.

use rcompile::options::{Command, Parsed};
use rcompile::{Error, link, options, report, verbs};
use rcompile_runtime::memory;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::Mutex;

static PANIC: Mutex<Option<String>> = Mutex::new(None);

fn main() {
    // Unwinding first removes what must not be left behind; the one line is printed at the end.
    set_hook(Box::new(|info| {
        let place = info.location().map_or("unknown place".into(), |l| format!("{}:{}", l.file(), l.line()));
        let text = format!("{place}: {}", info.payload_as_str().unwrap_or("panic"));
        PANIC.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(text);
    }));
    let run = || {
        link::guard::handle_signals()?;
        memory::leave_without_memory(link::guard::clean_up);
        rcompile_codegen::llvm::memory::leave_without_memory(memory::leave_now);
        match options::parse(std::env::args_os())? {
            Parsed::Run(command) => {
                // Executables that `compare` runs reserve more than they write to.
                if let Command::Build(_) = &command {
                    memory::keep_within_control_group();
                }
                verbs::dispatch(command)
            }
            Parsed::Print(text) => report::print(&text),
        }
    };
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let text = PANIC.lock().unwrap_or_else(|e| e.into_inner()).take();
        Err(Error::bug("panic", text.unwrap_or_default()))
    });
    if let Err(error) = result {
        error.lines().iter().for_each(|l| report::say(l));
        link::guard::end(error.exit_code());
    }
}
