//! The checkpoint of claims that are, or may be, prepared on this node. File name and format are
//! upstream's, so that a restarted kubelet can unprepare them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use k8s_openapi::api::resource::v1::ResourceClaim;
use reconcile::Object as _;
use serde_json::{Value, json};

use super::messages;

const CHECKPOINT_FILE: &str = "dra_manager_state";

/// A claim that drivers on this node prepare.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClaimInfo {
    pub uid: String,
    pub name: String,
    pub namespace: String,
    /// The UIDs of the pods that use it.
    pub pods: BTreeSet<String>,
    /// The devices that each driver returned. Empty before it was called.
    pub drivers: BTreeMap<String, Vec<messages::Device>>,
    /// All drivers have prepared the claim. Not in the checkpoint: preparing a claim again is
    /// idempotent.
    pub is_ready: bool,
}

impl ClaimInfo {
    /// `None` for a claim without an allocation.
    pub fn new(claim: &ResourceClaim) -> Option<ClaimInfo> {
        let allocation = claim.status.as_ref()?.allocation.as_ref()?;
        let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
        Some(ClaimInfo {
            uid: claim.uid().to_owned(),
            name: claim.name().to_owned(),
            namespace: claim.namespace().to_owned(),
            drivers: results.map(|result| (result.driver.clone(), Vec::new())).collect(),
            ..ClaimInfo::default()
        })
    }

    /// The claim as drivers receive it.
    pub fn message(&self) -> messages::Claim {
        messages::Claim { namespace: self.namespace.clone(), uid: self.uid.clone(), name: self.name.clone() }
    }

    /// The devices of one of the claim's requests, or of all, with their driver.
    pub fn devices<'a>(&'a self, request: &'a str) -> impl Iterator<Item = (&'a str, &'a messages::Device)> {
        let all = self.drivers.iter();
        let all =
            all.flat_map(|(driver, devices)| devices.iter().map(move |device| (driver.as_str(), device)));
        all.filter(move |(_, device)| {
            let names = &device.request_names;
            request.is_empty() || names.is_empty() || names.iter().any(|name| name == request)
        })
    }

    fn to_value(&self) -> Value {
        let device = |device: &messages::Device| {
            json!({
                "PoolName": device.pool_name,
                "DeviceName": device.device_name,
                "ShareID": device.share_id,
                "RequestNames": device.request_names,
                "CDIDeviceIDs": device.cdi_device_ids,
            })
        };
        let drivers = self.drivers.iter().map(|(driver, devices)| {
            (driver.clone(), json!({"Devices": devices.iter().map(device).collect::<Vec<_>>()}))
        });
        json!({
            "ClaimUID": self.uid,
            "ClaimName": self.name,
            "Namespace": self.namespace,
            "PodUIDs": self.pods.iter().map(|uid| (uid.clone(), json!({}))).collect::<serde_json::Map<_, _>>(),
            "DriverState": drivers.collect::<serde_json::Map<_, _>>(),
        })
    }

    fn from_value(value: &Value) -> ClaimInfo {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let strings =
            |value: &Value| value.as_array().into_iter().flatten().map(text).collect::<Vec<String>>();
        let device = |device: &Value| messages::Device {
            pool_name: text(&device["PoolName"]),
            device_name: text(&device["DeviceName"]),
            share_id: device["ShareID"].as_str().map(str::to_owned),
            request_names: strings(&device["RequestNames"]),
            cdi_device_ids: strings(&device["CDIDeviceIDs"]),
        };
        let drivers = value["DriverState"].as_object().into_iter().flatten();
        let drivers = drivers.map(|(driver, state)| {
            (driver.clone(), state["Devices"].as_array().into_iter().flatten().map(device).collect())
        });
        ClaimInfo {
            uid: text(&value["ClaimUID"]),
            name: text(&value["ClaimName"]),
            namespace: text(&value["Namespace"]),
            pods: value["PodUIDs"].as_object().into_iter().flatten().map(|(uid, _)| uid.clone()).collect(),
            drivers: drivers.collect(),
            is_ready: false,
        }
    }
}

/// The claims of this node by namespace and name.
#[derive(Debug, Default)]
pub struct ClaimInfoCache {
    dir: PathBuf,
    claims: BTreeMap<(String, String), ClaimInfo>,
}

impl ClaimInfoCache {
    /// Reads the checkpoint. An unreadable one is moved aside for inspection.
    pub fn open(dir: &Path) -> ClaimInfoCache {
        let file = dir.join(CHECKPOINT_FILE);
        let claims = match std::fs::read(&file) {
            Ok(text) => decode_checkpoint(&text).unwrap_or_else(|why| {
                tracing::error!(file = %file.display(), why, "DRA checkpoint is unreadable and was moved aside, its claims will not be unprepared");
                let _ = std::fs::rename(&file, dir.join(format!("{CHECKPOINT_FILE}.unreadable")));
                Vec::new()
            }),
            Err(_) => Vec::new(),
        };
        let key = |claim: &ClaimInfo| (claim.namespace.clone(), claim.name.clone());
        ClaimInfoCache {
            dir: dir.to_owned(),
            claims: claims.into_iter().map(|claim| (key(&claim), claim)).collect(),
        }
    }

    pub fn get(&self, namespace: &str, name: &str) -> Option<&ClaimInfo> {
        self.claims.get(&(namespace.to_owned(), name.to_owned()))
    }

    pub fn get_mut(&mut self, namespace: &str, name: &str) -> Option<&mut ClaimInfo> {
        self.claims.get_mut(&(namespace.to_owned(), name.to_owned()))
    }

    pub fn all(&self) -> impl Iterator<Item = &ClaimInfo> {
        self.claims.values()
    }

    /// The claims that a pod uses.
    pub fn for_pod(&self, pod: &str) -> impl Iterator<Item = &ClaimInfo> {
        self.claims.values().filter(move |claim| claim.pods.contains(pod))
    }

    /// The stored claim. Stores this one if there is none.
    pub fn get_or_insert(&mut self, claim: &ClaimInfo) -> &mut ClaimInfo {
        let key = (claim.namespace.clone(), claim.name.clone());
        self.claims.entry(key).or_insert_with(|| claim.clone())
    }

    pub fn remove(&mut self, claim: &messages::Claim) {
        self.claims.remove(&(claim.namespace.clone(), claim.name.clone()));
    }

    /// Writes the checkpoint atomically.
    pub fn sync_to_checkpoint(&self) -> io::Result<()> {
        let claims: Vec<Value> = self.claims.values().map(ClaimInfo::to_value).collect();
        let data = json!({
            "kind": "DRACheckpoint",
            "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
            "ClaimInfoStateList": claims,
        });
        let data = data.to_string();
        let text = json!({"Data": data, "Checksum": checksum(&data)}).to_string();
        std::fs::create_dir_all(&self.dir)?;
        let temporary = self.dir.join(format!(".{CHECKPOINT_FILE}"));
        let mut file = std::fs::File::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(temporary, self.dir.join(CHECKPOINT_FILE))
    }
}

fn decode_checkpoint(text: &[u8]) -> Result<Vec<ClaimInfo>, String> {
    let checkpoint: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let data = checkpoint["Data"].as_str().unwrap_or_default();
    if checkpoint["Checksum"] != checksum(data) {
        return Err("checkpoint is corrupted".to_owned());
    }
    let data: Value = serde_json::from_str(data).map_err(|error| error.to_string())?;
    Ok(data["ClaimInfoStateList"].as_array().into_iter().flatten().map(ClaimInfo::from_value).collect())
}

fn checksum(data: &str) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(data.as_bytes());
    crc.sum()
}
