//! Devices and ranks as this program prints them.

use tch::Device;

/// Returns a device as this program prints it: `CPU`, `GPU:0`.
pub(crate) fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("GPU:{index}"),
        Device::Cpu => "CPU".into(),
        other => format!("{other:?}"),
    }
}

/// Returns a rank's label: its device type and its number on its machine, such as `CPU:1` or `GPU:0`.
pub(crate) fn rank_label(device: Device, local_rank: usize) -> String {
    let device_type = if matches!(device, Device::Cuda(_)) { "GPU" } else { "CPU" };
    format!("{device_type}:{local_rank}")
}
