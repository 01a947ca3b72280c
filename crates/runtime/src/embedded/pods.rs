//! The pods of this node. For each one a task follows its supervisor.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::events::EventPublisher;
use super::protocol::{RunStatus, SupervisorRequest, SupervisorResponse};
use super::record::{self, ContainerRecord, PodRecord};
use super::supervisor_client::SupervisorClient;
use crate::cri::{ContainerEventType, LinuxContainerResources};

/// How long a starting skiff waits for the initial statuses of a supervisor.
const SUPERVISOR_TIMEOUT: Duration = Duration::from_secs(20);

/// The exit code of a container whose supervisor died without reporting one.
const UNKNOWN_EXIT_CODE: i32 = 255;

/// All pods by ID.
#[derive(Debug, Default)]
pub struct Pods {
    pods: Mutex<HashMap<String, Arc<Pod>>>,
    /// Names of pods and containers that are being created.
    names: Mutex<HashSet<String>>,
}

/// Reserves a name until it is dropped.
pub struct NameReservation<'a> {
    pods: &'a Pods,
    name: String,
}

impl Drop for NameReservation<'_> {
    fn drop(&mut self) {
        self.pods.names.lock().remove(&self.name);
    }
}

/// A pod sandbox.
#[derive(Debug)]
pub struct Pod {
    pub id: String,
    pub directory: PathBuf,
    pub record: Mutex<PodRecord>,
    pub containers: Mutex<BTreeMap<String, Arc<Container>>>,
    /// Whether its supervisor is running.
    pub is_ready: watch::Sender<bool>,
    /// It has been stopped completely; only its files are left.
    pub is_ended: AtomicBool,
    events: EventPublisher,
}

/// A container of a pod.
#[derive(Debug)]
pub struct Container {
    pub id: String,
    pub record: ContainerRecord,
    /// The resources that are in effect.
    pub resources: Mutex<LinuxContainerResources>,
    /// `None` until it is started.
    pub status: watch::Sender<Option<RunStatus>>,
}

impl Pods {
    /// Reserves a name during a creation. `taken` returns the ID of an existing object with that name.
    /// A client that retries a creation after a timeout must not get a second one.
    pub fn reserve(
        &self,
        name: String,
        taken: impl FnOnce() -> Option<String>,
    ) -> Result<NameReservation<'_>, String> {
        let holder = if self.names.lock().insert(name.clone()) {
            None
        } else {
            Some("a creation in progress".to_owned())
        };
        let reserved = holder.is_none().then(|| NameReservation { pods: self, name: name.clone() });
        match (holder.or_else(taken), reserved) {
            (None, Some(reserved)) => Ok(reserved),
            (holder, _) => Err(format!("name {name:?} is reserved for {:?}", holder.unwrap_or_default())),
        }
    }

    pub fn add(&self, pod: Arc<Pod>) {
        self.pods.lock().insert(pod.id.clone(), pod);
    }

    pub fn remove(&self, id: &str) {
        self.pods.lock().remove(id);
    }

    pub fn get(&self, id: &str) -> Option<Arc<Pod>> {
        self.pods.lock().get(id).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Pod>> {
        self.pods.lock().values().cloned().collect()
    }

    /// A container and its pod.
    pub fn container(&self, id: &str) -> Option<(Arc<Pod>, Arc<Container>)> {
        let pods = self.pods.lock();
        pods.values().find_map(|pod| Some((pod.clone(), pod.containers.lock().get(id)?.clone())))
    }
}

impl Pod {
    pub fn new(id: &str, directory: PathBuf, record: PodRecord, events: EventPublisher) -> Pod {
        Pod {
            id: id.to_owned(),
            directory,
            record: Mutex::new(record),
            containers: Mutex::default(),
            is_ready: watch::Sender::new(false),
            is_ended: AtomicBool::new(false),
            events,
        }
    }

    /// Reads a pod from its record.
    pub fn read(directory: &Path, events: &EventPublisher) -> std::io::Result<Pod> {
        let id = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let pod = Pod::new(&id, directory.to_owned(), record::read(directory)?, events.clone());
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let record: ContainerRecord = match record::read(&entry.path()) {
                Ok(record) => record,
                Err(error) if record::is_missing(&error) => continue,
                Err(error) => return Err(error),
            };
            let id = entry.file_name().to_string_lossy().into_owned();
            let status = record::last_status(&entry.path());
            pod.containers.lock().insert(id.clone(), Arc::new(Container::new(id, record, status)));
        }
        Ok(pod)
    }

    /// Follows the supervisor until it exits, then calls `on_lost`. Returns whether there is a
    /// supervisor, once its initial statuses have arrived. One that does not respond counts as
    /// existing: its processes run and use the pod's addresses.
    pub async fn follow(self: &Arc<Pod>, on_lost: impl FnOnce(Arc<Pod>) + Send + 'static) -> bool {
        let (ready_sender, known) = tokio::sync::oneshot::channel();
        let pod = self.clone();
        tokio::spawn(async move {
            let mut ready_sender = Some(ready_sender);
            if let Ok(mut caller) =
                SupervisorClient::send_request(&pod.directory, &SupervisorRequest::Watch, &[]).await
                && pod.receive_initial_statuses(&mut caller).await
            {
                pod.is_ready.send_replace(true);
                let _ = ready_sender.take().map(|ready_sender| ready_sender.send(()));
                while let Ok(Some(answer)) = caller.next().await {
                    pod.handle_answer(answer);
                }
            }
            pod.mark_stopped();
            on_lost(pod);
        });
        // Without a supervisor the sender is dropped. A timeout means that it exists but does not
        // respond.
        !matches!(tokio::time::timeout(SUPERVISOR_TIMEOUT, known).await, Ok(Err(_)))
    }

    async fn receive_initial_statuses(&self, caller: &mut SupervisorClient) -> bool {
        loop {
            match caller.next().await {
                Ok(Some(SupervisorResponse::Known)) => return true,
                Ok(Some(answer)) => self.handle_answer(answer),
                _ => return false,
            }
        }
    }

    fn handle_answer(&self, answer: SupervisorResponse) {
        let SupervisorResponse::Status { container, status } = answer else { return };
        let known = self.containers.lock().get(&container).cloned();
        let Some(known) = known else { return };
        let is_over = status.finished != 0 || status.failure.is_some();
        let is_started = status.started != 0;
        let before = known.status.send_replace(Some(status)).unwrap_or_default();
        if is_started && before.started == 0 {
            self.events.publish(ContainerEventType::Started, self, &container);
        }
        if is_over && before.finished == 0 && before.failure.is_none() {
            self.events.publish(ContainerEventType::Stopped, self, &container);
        }
    }

    /// Marks all containers as exited after the supervisor has exited.
    fn mark_stopped(&self) {
        let containers: Vec<_> = self.containers.lock().values().cloned().collect();
        for container in containers {
            let has_ended = container.status.send_if_modified(|status| match status {
                Some(status) if status.finished == 0 => {
                    // The supervisor may have recorded the exit without having sent it.
                    let written = record::last_status(&self.directory.join(&container.id));
                    *status = written.filter(|written| written.finished != 0).unwrap_or_else(|| RunStatus {
                        finished: super::now(),
                        exit_code: UNKNOWN_EXIT_CODE,
                        ..status.clone()
                    });
                    true
                }
                _ => false,
            });
            if has_ended {
                self.events.publish(ContainerEventType::Stopped, self, &container.id);
            }
        }
        self.is_ready.send_replace(false);
        self.events.publish(ContainerEventType::Stopped, self, &self.id);
    }
}

impl Container {
    pub fn new(id: String, record: ContainerRecord, status: Option<RunStatus>) -> Container {
        let created_with = || record.config.as_ref()?.linux.as_ref()?.resources.clone();
        let resources = record.resources.clone().or_else(created_with).unwrap_or_default();
        Container { id, record, resources: Mutex::new(resources), status: watch::Sender::new(status) }
    }

    pub fn status(&self) -> Option<RunStatus> {
        self.status.borrow().clone()
    }

    pub fn is_running(&self) -> bool {
        self.status.borrow().as_ref().is_some_and(|status| status.finished == 0 && status.failure.is_none())
    }
}
