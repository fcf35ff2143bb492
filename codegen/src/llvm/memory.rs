//! What happens where LLVM finds no memory: instead of an abort, or of a C++ exception that nobody catches, the caller's way to end.
//!
//! In: a function that ends the process. Out: it is called where `operator new` or LLVM's own allocator fails. A library without these two
//! functions, which an LLVM inside this program may be, goes on as it did.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;

static LEAVE: OnceLock<fn() -> !> = OnceLock::new();

extern "C" fn without_new() {
    if let Some(leave) = LEAVE.get() {
        leave()
    }
}

extern "C" fn without_llvm(_: *mut c_void, _: *const c_char, _: bool) {
    without_new();
}

/// From now on `leave` ends the process where LLVM finds no memory.
pub fn leave_without_memory(leave: fn() -> !) {
    type NewHandler = extern "C" fn();
    type SetNewHandler = unsafe extern "C" fn(NewHandler) -> *const c_void;
    type BadAllocHandler = extern "C" fn(*mut c_void, *const c_char, bool);
    type InstallBadAllocHandler = unsafe extern "C" fn(BadAllocHandler, *mut c_void);
    if LEAVE.set(leave).is_err() {
        return;
    }
    let program = libloading::os::unix::Library::this();
    // SAFETY: these are `std::set_new_handler(std::new_handler)` and `llvm::install_bad_alloc_error_handler(fatal_error_handler_t, void*)`,
    // of LLVM 19; each is called once, before there are other threads that use LLVM, with functions that live as long as the process.
    unsafe {
        if let Ok(set) = program.get::<SetNewHandler>(b"_ZSt15set_new_handlerPFvvE\0") {
            set(without_new);
        }
        if let Ok(install) = program.get::<InstallBadAllocHandler>(b"_ZN4llvm31install_bad_alloc_error_handlerEPFvPvPKcbES0_\0") {
            install(without_llvm, std::ptr::null_mut());
        }
    }
}
